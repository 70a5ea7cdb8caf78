"""Tool calls are parsed as mlx-lm parses them, in bounded time, and never on the event loop."""

import asyncio
import importlib
import json
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from mlx_lm.tool_parsers import gemma4, json_tools

from paged_kv.server.completions.tool_calls import (
    LONG_CALL_CHARACTERS,
    CallParser,
    ChoiceCalls,
    Parser,
)
from paged_kv.server.completions.worker_threads import WorkerThreads

# A call of write(path="a.py", text=TEXT) as each parser reads it.
CALLS = {
    "gemma4": 'call:write{path:<|"|>a.py<|"|>,text:<|"|>TEXT<|"|>}',
    "json_tools": '{"name": "write", "arguments": {"path": "a.py", "text": "TEXT"}}',
    "minicpm5": '<function name="write"><param name="path">a.py</param>'
    '<param name="text">TEXT</param></function>',
    "pythonic": "[write(path='a.py', text='TEXT')]",
}
STRING = {"type": "string"}
SCHEMA = {"type": "object", "properties": {"path": STRING, "text": STRING}}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]
SHORT, LONG = "naïve 日本 " * 9, "naïve 日本 " * LONG_CALL_CHARACTERS
# gemma4 takes minutes for it.
SLOW = "call:a{" * 20_000


def run(work: Callable[[CallParser], Coroutine[Any, Any, Any]]) -> Any:
    """Run work that parses calls."""

    async def with_parser() -> Any:
        workers = WorkerThreads()
        try:
            return await work(CallParser(workers))
        finally:
            workers.close()

    return asyncio.run(with_parser())


def parsed_by(parser: Parser, text: str) -> Any:
    return run(lambda calls: calls.parse(parser, TOOLS, text))


def formatted(parser: Parser, *texts: str, is_streamed: bool = True) -> Any:
    """The calls of a choice in OpenAI's form, without their random ids."""
    found = run(lambda calls: ChoiceCalls(calls, parser, TOOLS, is_streamed).formatted(texts))
    for call in found:
        assert call.pop("id")
    return found


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Those that are started for parsers."""
    begun: list[Process] = []
    create = asyncio.create_subprocess_exec

    async def noted(*command: str, **options: Any) -> Process:
        begun.append(await create(*command, **options))
        return begun[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    return begun


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_parsed_as_by_mlx_lm(name: str, processes: list[Process]) -> None:
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call
    arguments = {"path": "a.py", "text": SHORT.strip()}
    for text in (SHORT.strip(), LONG.strip()):
        said = CALLS[name].replace("TEXT", text)
        parsed = parsed_by(parser, said)
        assert parsed == parser(said, TOOLS)
        assert (parsed[0] if isinstance(parsed, list) else parsed)["arguments"] == {
            **arguments,
            "text": text,
        }
    assert len(processes) == 1, "of the long text only"


def test_calls_are_numbered_and_those_that_are_not_understood_left_out(
    caplog: pytest.LogCaptureFixture, processes: list[Process]
) -> None:
    good = CALLS["json_tools"]
    bad = ['{"name"', '{"name": "f"}', '["f"]', "{" * (LONG_CALL_CHARACTERS + 1)]
    texts = (good, *bad, good.replace("TEXT", LONG), good)
    found = formatted(json_tools.parse_tool_call, *texts)
    assert [call["index"] for call in found] == [0, 1, 2]
    lengths = [len(json.loads(call["function"]["arguments"])["text"]) for call in found]
    assert lengths == [4, len(LONG), 4]
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "JSONDecodeError", "KeyError", "AttributeError", "ValueError",
    ]  # fmt: skip
    assert "JSONDecodeError: Expecting property name" in caplog.text
    assert "index" not in formatted(json_tools.parse_tool_call, good, is_streamed=False)[0]
    assert len(processes) == 2


@pytest.mark.parametrize(
    ("length", "numbers", "why"),
    [
        (9000, 1000, "characters became"),
        pytest.param(
            *(100_000, 100_000, "MemoryError"),
            marks=pytest.mark.skipif(sys.platform != "linux", reason="limits no memory"),
        ),
    ],
)
def test_a_call_that_becomes_far_longer_is_refused(
    length: int, numbers: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """gemma4 puts texts where their numbers stand between two zero bytes."""
    named = ",".join(["\x000\x00"] * numbers)
    said = f'call:a{{x:<|"|>{"x" * length}<|"|>,y:[{named}]}}'
    assert formatted(gemma4.parse_tool_call, said) == []
    assert why in caplog.text


async def running_process(processes: list[Process]) -> None:
    while not processes:
        await asyncio.sleep(0.01)
