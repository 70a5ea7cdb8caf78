"""Clients that leave, wait, hurry or have a key."""

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError

from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    paged_server,
    wait_until,
)
from tests.support.tiny_model import BLOCK

# Room for 2048 tokens, which are promised before a request begins.
TIGHT = ["--max-tokens", "4", "--max-kv-bytes", str(8 * BLOCK), "--admission", "reserve"]
# Never the token that ends a text.
GO_ON = {"0": -1000}
NAME = "default_model"


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[PagedRunningServer]:
    # A chunk of a prompt takes only a moment on any machine.
    with paged_server("--model", tiny, *TIGHT, "--prefill-step-size", "64") as started:
        yield started


def send(running: PagedRunningServer, **body: Any) -> socket.socket:
    """Ask, and do not read the answer."""
    content = json.dumps({"prompt": "import os\n", "logit_bias": GO_ON, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S)
    client.sendall(head.encode() + content)
    return client


def jobs(running: PagedRunningServer, stage: str) -> int:
    return sum(job.stage == stage for job in list(running.service.thread.jobs.values()))


def test_who_leaves_the_batch_the_line_or_a_prompt_is_forgotten(
    running: PagedRunningServer,
) -> None:
    """The server stops generating for clients that left, far from the end of their answers."""
    before = running.service.metrics.generation_tokens
    talking = send(running, max_tokens=1900)
    wait_until(lambda: running.service.metrics.generation_tokens > before)
    waiting = [send(running, max_tokens=1900, stream=number % 2 == 0) for number in range(6)]
    wait_until(lambda: jobs(running, "waiting") == 6)
    for client in waiting:
        client.close()
    wait_until(lambda: jobs(running, "waiting") == 0)
    assert jobs(running, "running") == 1
    talking.close()
    assert_idle_pools_hold_nothing(running)
    # It takes 28 steps with 64 tokens each.
    reading = send(running, prompt=[7] * 1800, max_tokens=10)
    wait_until(lambda: jobs(running, "running") == 1)
    reading.close()
    assert_idle_pools_hold_nothing(running)
    assert running.service.metrics.generation_tokens - before < 1900


def test_with_keys_prompts_are_apart_and_what_tells_of_clients_needs_one(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    keys = tmp_path / "keys"
    keys.write_text("alice-key\n\n bob-k\u00e9y \n", encoding="utf-8")
    options = ["--api-key", str(keys), "--allowed-hosts", "a.example", "--max-kv-bytes", "32MB"]
    with paged_server("--model", tiny, *options) as running:

        def cached(key: str, **body: Any) -> int:
            answer = running.client(api_key=key).completions.create(
                model=NAME, prompt=[5] * 600, max_tokens=1, extra_body=body
            )
            running.wait_until_idle()
            assert answer.usage
            assert answer.usage.prompt_tokens_details
            return answer.usage.prompt_tokens_details.cached_tokens or 0

        assert [cached("alice-key"), cached("alice-key")] == [0, 599]
        assert cached("alice-key", cache_salt="s") == 0
        for wrong in ("alice-ke", "alice-key2", "bob"):
            with pytest.raises(AuthenticationError) as refused:
                cached(wrong)
            assert refused.value.code == "invalid_api_key"
        key = {"Authorization": "Bearer alice-key"}
        for path in ("/kv", "/kv/data", "/metrics"):
            assert status_of(running, path) == 401
            assert status_of(running, path, Authorization="Bearer bob-key") == 401
            assert status_of(running, path, **key, Host="a.example:80") == 200
            assert status_of(running, path, **key, Host="evil.example") == 403
        for path in ("/health", "/ready"):
            assert status_of(running, path, Host="evil.example") == 200
        object.__setattr__(running.service.options, "open_status", True)
        for path in ("/kv", "/kv/data", "/metrics"):
            assert status_of(running, path) == 200
            assert status_of(running, path, Host="evil.example") == 403
        assert status_of(running, "/v1/models") == 401


def status_of(running: PagedRunningServer, path: str, **headers: str) -> int:
    client = HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    client.request("GET", path, headers=headers)
    return client.getresponse().status
