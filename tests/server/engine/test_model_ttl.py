"""An idle server unloads its model, and the next request brings it back."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from paged_kv.server.engine import generation_thread
from paged_kv.trace import read_trace
from tests.support.patience import wait_until
from tests.support.running_server import PagedRunningServer, paged_server


def ask(running: PagedRunningServer, tokens: int = 4) -> Any:
    """A stream."""
    create = running.client().completions.create
    sent: Any = {"prompt": "import os", "temperature": 0, "logit_bias": {"0": -1000}}
    return create(model="default_model", max_tokens=tokens, stream=True, **sent)


def text_of(events: Iterable[Any]) -> str:
    return "".join(event.choices[0].text for event in events if event.choices)


def test_requests_start_the_time_again(monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    seconds = [0.0]
    monkeypatch.setattr(generation_thread, "monotonic", lambda: seconds[0])
    with paged_server("--model", tiny, "--max-kv-bytes", "64MB", "--model-ttl", "10") as running:
        factories = running.provider.factories
        for _ in range(3):
            assert text_of(ask(running))
            running.wait_until_idle()
            seconds[0] += 9
        assert running.provider.factories is factories


def test_a_trace_goes_on_with_the_model_that_came_back(
    monkeypatch: pytest.MonkeyPatch, tiny: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGED_KV_TRACE", str(tmp_path / "trace"))
    with paged_server("--model", tiny, "--max-kv-bytes", "64MB", "--model-ttl", "0.01") as running:
        for tokens in (3, 5):
            assert text_of(ask(running, tokens))
            wait_until(lambda: running.provider.model is None)
    assert [each.answer_length for each in read_trace(tmp_path / "trace").requests] == [3, 5]
