"""An idle server unloads its model, and the next request brings it back."""

import weakref
from typing import Any

import pytest
from openai import OpenAI

from paged_kv.server.engine import generation_thread
from tests.support.folders import MODEL_FOLDERS
from tests.support.patience import wait_until
from tests.support.running_server import PagedRunningServer, paged_server

MODEL = str(MODEL_FOLDERS["stdlib-llama"])


def ask(client: OpenAI) -> Any:
    """A stream of 30 tokens."""
    return client.completions.create(
        model=MODEL, prompt="import os", max_tokens=30, temperature=0, stream=True
    )


def text_of(stream: Any) -> str:
    return "".join(event.choices[0].text for event in stream if event.choices)


def is_unloaded(running: PagedRunningServer) -> bool:
    return running.provider.loaded is None and running.service.thread._rows is None


def test_a_model_goes_after_its_time_and_comes_back() -> None:
    with paged_server("--model", MODEL, "--model-ttl", "0") as running:
        client = running.client()
        texts, models = [], []
        for _ in range(3):
            stream = ask(client)
            first = next(stream)
            # It stays while a request is there.
            assert running.provider.loaded is not None
            models.append(weakref.ref(running.provider.model))
            texts.append(first.choices[0].text + text_of(stream))
            wait_until(lambda: is_unloaded(running))
            assert models[-1]() is None
            assert running.provider.factories == []
        assert len({*texts}) == 1
        assert texts[0]
        assert running.service.thread.is_alive


def test_requests_start_the_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(generation_thread, "monotonic", lambda: seconds[0])
    with paged_server("--model", MODEL, "--model-ttl", "10") as running:
        factories = running.provider.factories
        for _ in range(4):
            assert text_of(ask(running.client()))
            running.wait_until_idle()
            seconds[0] += 9
        assert running.provider.factories is factories


def test_without_a_time_the_model_stays() -> None:
    with paged_server("--model", MODEL) as running:
        text_of(ask(running.client()))
        running.wait_until_idle()
        assert running.provider.loaded is not None
