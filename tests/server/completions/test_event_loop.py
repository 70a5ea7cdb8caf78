"""Nothing whose cost a client chooses runs on the event loop, which answers everybody."""

import asyncio
from asyncio.subprocess import Process
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, current_thread
from typing import Any
from urllib.request import urlopen

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import gemma4
from openai import OpenAI

from paged_kv.server.completions import answer_bodies, handler
from paged_kv.server.completions.answer_bodies import OpenAIAnswers
from paged_kv.server.engine.choice_text import ChoiceText, Delta
from paged_kv.server.engine.jobs import Token
from paged_kv.server.http.connection import MOST_READ_BYTES, Connection
from tests.support.running_server import PATIENCE_S, PagedRunningServer, paged_server, wait_until
from tests.support.server_process import post

WITH_LOGPROBS: dict[str, Any] = {"logprobs": 2}


def ask(client: OpenAI, **more: Any) -> Any:
    answer = client.completions.create(model="default_model", prompt="import os", **more)
    return list(answer) if more.get("stream") else answer


@pytest.mark.parametrize(
    ("owner", "name", "more"),
    [
        (answer_bodies, "parse_body", {}),
        (handler, "make_jobs", {}),
        (handler, "stop_machine", {"stop": ["a", "b"]}),
        (handler, "_read_all", {}),
        (OpenAIAnswers, "whole", WITH_LOGPROBS),
        (OpenAIAnswers, "on_delta", {**WITH_LOGPROBS, "stream": True}),
    ],
)
def test_others_are_answered_during_slow_work(
    owner: Any,
    name: str,
    more: dict[str, Any],
    running: PagedRunningServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on = Event(), Event()
    work: Callable[..., Any] = getattr(owner, name)

    def slow(*arguments: Any, **named: Any) -> Any:
        begun.set()
        assert current_thread() is not running._thread, "on the event loop"
        assert goes_on.wait(PATIENCE_S)
        return work(*arguments, **named)

    with ThreadPoolExecutor(1) as threads, running.client() as client:
        monkeypatch.setattr(owner, name, slow)
        asked = threads.submit(ask, client, **more)
        assert begun.wait(PATIENCE_S)
        if not asked.done():
            with urlopen(f"http://127.0.0.1:{running.port}/health", timeout=PATIENCE_S) as answer:
                assert answer.status == 200
        goes_on.set()
        assert asked.result(PATIENCE_S)


def test_a_long_body_is_read_in_parts(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser of HTTP takes its time for each byte if chunks are that short."""
    lengths: list[int] = []
    received = Connection.data_received

    def noted(connection: Connection, data: bytes) -> None:
        lengths.append(len(data))
        received(connection, data)

    monkeypatch.setattr(Connection, "data_received", noted)
    with running.client() as client:
        ask(client, user="u" * 1_000_000)
    assert sum(lengths) > 1_000_000
    assert max(lengths) <= MOST_READ_BYTES


@pytest.fixture
def slow_calls(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Every answer ends with a tool call that takes minutes; the processes that parse it."""
    begun: list[Process] = []
    take, create = ChoiceText.take, asyncio.create_subprocess_exec

    def with_a_call(text: ChoiceText, token: Token) -> Delta:
        delta = take(text, token)
        if delta.finish_reason is not None:
            delta.calls.append("call:a{" * 20_000)
        return delta

    async def noted(*command: str, **options: Any) -> Process:
        begun.append(await create(*command, **options))
        return begun[-1]

    monkeypatch.setattr(ChoiceText, "take", with_a_call)
    monkeypatch.setattr(TokenizerWrapper, "tool_parser", staticmethod(gemma4.parse_tool_call))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    return begun


@pytest.mark.slow
def test_a_server_that_ends_leaves_no_process(tiny: str, slow_calls: list[Process]) -> None:
    with ThreadPoolExecutor(1) as threads:
        with paged_server("--model", tiny, "--max-kv-bytes", "64MB") as server:
            threads.submit(post, server.port, max_tokens=1)
            wait_until(lambda: slow_calls)
        assert slow_calls[0].returncode is not None
