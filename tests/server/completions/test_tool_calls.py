"""Tool calls are parsed as mlx-lm parses them, in bounded time, and never on the event loop."""

import asyncio
import importlib
import json
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlx_lm.tool_parsers import gemma4, json_tools

from paged_kv.server.completions.answer_bodies import ChatAnswers
from paged_kv.server.completions.interface import Call, Choice, Usage
from paged_kv.server.completions.service import WorkerThreads
from paged_kv.server.completions.tool_calls import (
    LONG_CALL_CHARACTERS,
    CallsAndText,
    ChoiceCalls,
    Parser,
    parse_calls,
)
from paged_kv.server.engine.choice_text import Delta
from paged_kv.server.http.schema import ChatBody

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


def run(work: Callable[[WorkerThreads], Coroutine[Any, Any, Any]]) -> Any:
    """Run work that parses calls."""

    async def with_parser() -> Any:
        workers = WorkerThreads()
        try:
            return await work(workers)
        finally:
            workers.close()

    return asyncio.run(with_parser())


def parsed_by(parser: Parser, text: str) -> Any:
    return run(lambda workers: parse_calls(workers, parser, TOOLS, text))


def choice_calls(workers: WorkerThreads, parser: Parser, is_streamed: bool = True) -> ChoiceCalls:
    marks = {"tool_call_start": "<", "tool_call_end": ">"}
    return ChoiceCalls(workers, SimpleNamespace(tool_parser=parser, **marks), TOOLS, is_streamed)


def formatted(parser: Parser, *texts: str, is_streamed: bool = True, **more: Any) -> CallsAndText:
    """What a choice has of these calls."""
    delta = Delta(calls=[*texts], **more)
    taken = run(lambda workers: choice_calls(workers, parser, is_streamed).take(delta))
    return cast("CallsAndText", taken)


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


def test_calls_are_numbered_and_those_that_are_not_understood_are_text(
    caplog: pytest.LogCaptureFixture, processes: list[Process]
) -> None:
    good = CALLS["json_tools"]
    bad = [
        '{"name"',
        '{"name": "f"}',
        '{"arguments": {}}',
        '["f"]',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\\ud83d"}}',
        "{" * (LONG_CALL_CHARACTERS + 1),
    ]
    texts = (good, *bad, good.replace("TEXT", LONG), good)
    cut: Any = {"open_call": good[:9], "finish_reason": "length"}
    found, text = formatted(json_tools.parse_tool_call, *texts, text="\n", **cut)
    assert text == "".join(f"<{each}>" for each in bad) + f"\n<{good[:9]}"
    assert [call.index for call in found] == [0, 1, 2]
    lengths = [len(json.loads(call.arguments)["text"]) for call in found]
    assert lengths == [4, len(LONG), 4]
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "JSONDecodeError", "KeyError", "KeyError", "TypeError", "ValueError", "UnicodeEncodeError",
        "ValueError", "JSONDecodeError",
    ]  # fmt: skip
    assert "JSONDecodeError: Expecting property name" in caplog.text
    assert formatted(cast("Parser", None), text="a") == ([], "a"), "of a model without a parser"
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
    assert formatted(gemma4.parse_tool_call, said) == ([], f"<{said}>")
    assert why in caplog.text


ARGUMENTS = {"path": 'a "b\\', "text": "{[\\\n}]\u00e9", "lines": [1, {"to": None}]}
WRITTEN = json.dumps(ARGUMENTS)
FORMS = {
    "json_tools": f'\n{{"name": "write", "arguments": {WRITTEN}}}\n',
    "mistral": f"write[ARGS]{WRITTEN}write[ARGS] {WRITTEN}",
    "kimi_k2": "".join(
        f"<|tool_call_begin|>functions.write:{number}<|tool_call_argument_begin|>{WRITTEN}"
        "<|tool_call_end|>"
        for number in range(2)
    ),
    # Texts that look like their end, like none, and like null; then a value that is no text.
    **{
        f"qwen3_coder {number}": f"\n<function=write>\n<parameter=path>\n{path}\n</parameter>\n"
        f"<parameter=text>{text}</parameter>\n{rest}</function>\n"
        for number, (path, text, rest) in enumerate(
            [
                ('a "b\\\n</para\n\n', "nullable\n</parameter", ""),
                ("NULL", "", "<parameter=lines>\n[1, 2]\n</parameter>\n"),
                ("nul", "\n\n\n", "<parameter=all>\ntrue\n</parameter>\n"),
            ]
        )
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", [1, 7, 60])
def test_arguments_are_streamed_as_they_are_written(form: str, step: int) -> None:
    text = FORMS[form]
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{form.split()[0]}").parse_tool_call

    async def streamed(workers: WorkerThreads) -> list[Any]:
        choice = choice_calls(workers, parser)
        deltas = [Delta(open_call=text[:end]) for end in range(0, len(text), step)]
        return [await choice.take(each) for each in (*deltas, Delta(calls=[text]))]

    async def cut(workers: WorkerThreads) -> list[Any]:
        choice, half = choice_calls(workers, parser), text[: len(text) // 2]
        reasons = (None, "length")
        return [await choice.take(Delta(open_call=half, finish_reason=why)) for why in reasons]

    assert run(cut)[1] == ([], ""), "what is sent of a call is not text too"
    told, texts = zip(*run(streamed), strict=True)
    assert not any(texts)
    whole = parser(text, TOOLS)
    expected = whole if isinstance(whole, list) else [whole]
    pieces = [piece for each in told for piece in each]
    heads = [piece for piece in pieces if piece.call_id]
    assert [each.name for each in heads] == [each["name"] for each in expected]
    assert [each.call_id for each in heads] == [
        each.get("id", got.call_id) for each, got in zip(expected, heads, strict=True)
    ]
    joined = [""] * len(expected)
    for piece in pieces:
        joined[piece.index] += piece.arguments
    assert [json.loads(each) for each in joined] == [each["arguments"] for each in expected]
    assert max(len(each.arguments) for each in pieces) < 30 + step


def test_a_line_end_within_a_text_of_json_is_mended_and_a_text_without_a_head_read_whole() -> None:
    parser = json_tools.parse_tool_call
    written = '{"name": "write", "arguments": {"text": "a\n'

    async def streamed(workers: WorkerThreads) -> list[Any]:
        choice = choice_calls(workers, parser)
        other = '{"arguments": {}, "name": "f"}'
        deltas = [Delta(open_call=written), Delta(calls=[written + '"}}'])]
        deltas += [Delta(open_call=other), Delta(calls=[other])]
        return [await choice.take(each) for each in deltas]

    (begun,), (ended,), nothing, (whole,) = (calls for calls, _ in run(streamed))
    arguments = begun.arguments + ended.arguments
    assert json.loads(arguments) == {"text": "a\n"}
    assert (nothing, whole.index, whole.name) == ([], 1, "f")


def test_only_calls_of_streams_have_a_number() -> None:
    answers = ChatAnswers(ChatBody.model_construct(messages=[]), "a", None)
    begun = Choice(0, calls=[Call("1", "f", "{}", 1)])
    (chunk,) = answers.on_delta(Choice(0, calls=[*begun.calls, Call("", "", "}", 1)]))
    called, piece = chunk["choices"][0]["delta"]["tool_calls"]
    assert piece == {"function": {"arguments": "}"}, "index": 1}
    whole = answers.whole([begun], Usage())["choices"][0]["message"]["tool_calls"]
    assert [each | {"index": 1} for each in whole] == [called]
    assert whole[0] == {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
