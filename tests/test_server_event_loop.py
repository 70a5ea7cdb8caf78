"""Nothing whose cost a client chooses runs on the event loop, which answers everybody."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, current_thread
from typing import Any
from urllib.request import urlopen

import pytest
from openai import OpenAI

from paged_kv.integrations.server.completions import completion_plan, completions
from paged_kv.integrations.server.completions.answer_bodies import Answers
from paged_kv.integrations.server.http.connection import MOST_READ_BYTES, Connection
from tests.conftest import MODEL_FOLDERS
from tests.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    paged_server,
    with_small_model,
)

WITH_LOGPROBS: dict[str, Any] = {"logprobs": 2}


@pytest.fixture(scope="module")
def running() -> Iterator[PagedRunningServer]:
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-tokens", "2"]
    with with_small_model(), paged_server(*options, "--max-kv-bytes", "64MB") as server:
        yield server


def ask(client: OpenAI, **more: Any) -> Any:
    answer = client.completions.create(model="default_model", prompt="import os", **more)
    return list(answer) if more.get("stream") else answer


@pytest.mark.parametrize(
    ("owner", "name", "more"),
    [
        (completions, "parse_body", {}),
        (completions, "make_plan", {}),
        (completion_plan, "stop_machine", {"stop": ["a", "b"]}),
        (completions, "_read_all", {}),
        (Answers, "whole", WITH_LOGPROBS),
        (Answers, "chunk", {**WITH_LOGPROBS, "stream": True}),
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
