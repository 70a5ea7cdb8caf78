"""Clients that leave, wait, hurry or have a key."""

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AuthenticationError, BadRequestError

from paged_kv.server.completions import event_stream
from paged_kv.server.engine.jobs import Stage
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


def jobs(running: PagedRunningServer, stage: Stage) -> int:
    return sum(job.stage is stage for job in list(running.service.thread.jobs.values()))


def test_who_leaves_the_batch_the_line_or_a_prompt_is_forgotten(
    running: PagedRunningServer,
) -> None:
    """The server stops generating for clients that left, far from the end of their answers."""
    before = running.service.metrics.generation_tokens
    talking = send(running, max_tokens=1900)
    wait_until(lambda: running.service.metrics.generation_tokens > before)
    waiting = [send(running, max_tokens=1900, stream=number % 2 == 0) for number in range(6)]
    wait_until(lambda: jobs(running, Stage.WAITING) == 6)
    for client in waiting:
        client.close()
    wait_until(lambda: jobs(running, Stage.WAITING) == 0)
    assert jobs(running, Stage.RUNNING) == 1
    talking.close()
    assert_idle_pools_hold_nothing(running)
    # It takes 28 steps with 64 tokens each.
    reading = send(running, prompt=[7] * 1800, max_tokens=10)
    wait_until(lambda: jobs(running, Stage.RUNNING) == 1)
    reading.close()
    assert_idle_pools_hold_nothing(running)
    assert running.service.metrics.generation_tokens - before < 1900


def test_a_stream_whose_client_leaves_during_a_long_step_ends(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "KEEPALIVE_S", 0.1)
    goes_on = Event()

    def hold(_: Any) -> None:
        assert goes_on.wait(PATIENCE_S)

    stream = running.client().completions.create(
        model=NAME, prompt="a", max_tokens=1900, stream=True, logit_bias=GO_ON
    )
    next(stream)
    running.service.thread._mailbox.put(hold)
    try:
        stream.close()
        wait_until(lambda: not running.service.gate.inside)
    finally:
        goes_on.set()
    running.wait_until_idle()


def test_without_patience_an_idle_server_serves_and_a_full_one_refuses(tiny: str) -> None:
    with paged_server("--model", tiny, *TIGHT, "--admission-timeout", "0") as running:
        client = running.client()
        assert client.completions.create(model=NAME, prompt="import").choices[0].text
        with send(running, max_tokens=1900):
            wait_until(lambda: jobs(running, Stage.RUNNING) == 1)
            with pytest.raises(APIStatusError) as refused:
                client.completions.create(model=NAME, prompt="import", max_tokens=1000)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["Retry-After"] == "1"
            # A request that can never fit is refused at once.
            with pytest.raises(BadRequestError, match=r"too long: 3000 tokens > \d+ max") as long:
                client.completions.create(model=NAME, prompt=[7] * 3000, max_tokens=1)
            assert long.value.code == "context_length_exceeded"


def test_patience_counts_while_a_batch_ends_for_a_request_that_is_computed_alone(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.service.thread._admission, "patience_s", 0.1)
    talking = send(running, max_tokens=1500)
    wait_until(lambda: jobs(running, Stage.RUNNING) == 1)
    monkeypatch.setattr(Rows, "_is_alone", lambda *_: True)
    with pytest.raises(APIStatusError, match=r"could not begin in 0.1 s"):
        running.client().completions.create(model=NAME, prompt="import")
    assert jobs(running, Stage.RUNNING) == 1
    talking.close()
    running.wait_until_idle()


def test_a_long_prompt_is_read_between_the_tokens_of_others(running: PagedRunningServer) -> None:
    create, metrics = running.client().completions.create, running.service.metrics
    sent: Any = {"model": NAME, "prompt": "a", "max_tokens": 500, "logit_bias": GO_ON}
    stream = create(**sent, stream=True)
    next(stream)
    before = metrics.generation_tokens
    # 24 chunks, and the stream gets a token after each.
    create(model=NAME, prompt=[11] * 1500, max_tokens=1)
    assert metrics.generation_tokens - before > 12
    stream.close()


def test_a_prompt_that_ends_at_a_stop_word_makes_room_for_the_next_of_its_request(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.service.thread._admission, "places", 1)
    create = running.client().completions.create
    said = create(model=NAME, prompt="import os\n", temperature=0)
    answer = create(
        model=NAME,
        prompt=["import os\n"] * 2,
        max_tokens=900,
        temperature=0,
        stop=said.choices[0].text[:1],
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]


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
        monkeypatch.setattr(running.service.options, "open_status", True)
        for path in ("/kv", "/kv/data", "/metrics"):
            assert status_of(running, path) == 200
            assert status_of(running, path, Host="evil.example") == 403
        assert status_of(running, "/v1/models") == 401


def status_of(running: PagedRunningServer, path: str, **headers: str) -> int:
    client = HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    client.request("GET", path, headers=headers)
    return client.getresponse().status
