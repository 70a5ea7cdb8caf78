"""Clients that leave, wait, hurry or have a key."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from openai import APIStatusError, AuthenticationError

from paged_kv.server.completions import conversation
from paged_kv.server.engine.jobs import Stage
from paged_kv.server.engine.rows import Rows
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
    wait_until,
)

LLAMA = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-tokens", "4"]
# Never the token that ends a text.
GO_ON = {"0": -1000}
NAME = "default_model"


@pytest.fixture(scope="module", autouse=True)
def _float32() -> Iterator[None]:
    with in_float32():
        yield


@pytest.fixture(scope="module")
def running() -> Iterator[PagedRunningServer]:
    # A chunk of a prompt takes only a moment on any machine.
    options = ["--max-kv-bytes", "12.8MB", "--prefill-step-size", "64", "--admission", "reserve"]
    with paged_server(*LLAMA, *options) as server:
        yield server


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


def test_many_that_leave_do_not_keep_those_that_stay(running: PagedRunningServer) -> None:
    """The budget has room for about three of them at a time."""
    with ThreadPoolExecutor(10) as pool:
        leaving = [send(running, max_tokens=600, stream=True) for _ in range(25)]
        staying = [
            pool.submit(
                running.client().completions.create, model=NAME, prompt=f"def f{number}", seed=1
            )
            for number in range(10)
        ]
        leaving += [send(running, max_tokens=600) for _ in range(25)]
        for client in leaving:
            client.close()
        assert all(answer.result().choices[0].text for answer in staying)
    assert_idle_pools_hold_nothing(running)


def test_no_part_of_an_answer_waits_for_the_client_to_acknowledge_another(
    running: PagedRunningServer,
) -> None:
    client = send(running, stream=True, max_tokens=1900)
    connections = running.server._uvicorn.server_state.connections
    wait_until(lambda: len(connections) == 1)
    (connection,) = connections
    its_socket = connection.transport.get_extra_info("socket")
    wait_until(lambda: bool(its_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
    client.close()
    running.wait_until_idle()


def test_a_stream_whose_client_leaves_during_a_long_step_ends(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "KEEPALIVE_S", 0.1)
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


def test_a_stream_that_is_cut_gives_its_blocks_back_at_once(running: PagedRunningServer) -> None:
    """As the status page counts them, without asking the pool."""
    (pool,) = running.pools
    stream = running.client().completions.create(
        model=NAME, prompt=[9] * 1000, max_tokens=800, stream=True, logit_bias=GO_ON
    )
    next(stream)
    assert pool.snapshot().blocks_used >= 4
    stream.close()
    wait_until(lambda: pool.snapshot().blocks_used == 0)
    running.wait_until_idle()


def test_without_patience_an_idle_server_serves_and_a_full_one_refuses() -> None:
    limits = ["--admission-timeout", "0", "--max-kv-bytes", "12.8MB", "--admission", "reserve"]
    with paged_server(*LLAMA, *limits) as running:
        client = running.client()
        assert client.completions.create(model=NAME, prompt="import").choices[0].text
        talking = send(running, max_tokens=1900)
        wait_until(lambda: jobs(running, Stage.RUNNING) == 1)
        with pytest.raises(APIStatusError, match="could not begin in 0 s") as refused:
            client.completions.create(model=NAME, prompt="import", max_tokens=1000)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["Retry-After"] == "1"
        # A request that can never fit is refused at once.
        with pytest.raises(APIStatusError, match="fit: shorten the prompt") as refused:
            client.completions.create(model=NAME, prompt=[7] * 3000, max_tokens=1)
        assert refused.value.status_code == 400
        talking.close()


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
    stream = running.client().completions.create(
        model=NAME, prompt="import os\n", max_tokens=300, stream=True, logit_bias=GO_ON
    )
    next(stream)
    reading = send(running, prompt=[11] * 1500, max_tokens=1, stream=True)
    # 24 chunks, and the stream gets a token after each.
    came = 0
    while jobs(running, Stage.RUNNING) < 2:
        next(stream)
    while jobs(running, Stage.RUNNING) == 2:
        next(stream)
        came += 1
    assert came > 12
    stream.close()
    reading.close()
    running.wait_until_idle()


def test_a_prompt_that_ends_at_a_stop_word_makes_room_for_the_next_of_its_request() -> None:
    with paged_server(*LLAMA, "--decode-concurrency", "1", "--max-kv-bytes", "12.8MB") as running:
        client = running.client()
        said = client.completions.create(model=NAME, prompt="import os\n", temperature=0)
        answer = client.completions.create(
            model=NAME,
            prompt=["import os\n"] * 2,
            max_tokens=900,
            temperature=0,
            stop=said.choices[0].text[:1],
        )
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]


def test_keys_are_needed_and_keep_prompts_apart(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice-key\n\n bob-k\u00e9y \n", encoding="utf-8")
    with paged_server(*LLAMA, "--api-key", str(keys), "--max-kv-bytes", "32MB") as running:
        prompt = [5] * 600

        def cached(key: str, **body: Any) -> int:
            answer = running.client(api_key=key).completions.create(
                model=NAME, prompt=prompt, extra_body=body
            )
            running.wait_until_idle()
            assert answer.usage
            assert answer.usage.prompt_tokens_details
            return answer.usage.prompt_tokens_details.cached_tokens or 0

        assert cached("alice-key") == 0
        assert cached("alice-key") == 599
        assert cached("alice-key", cache_salt="s") == 0
        for wrong in ("alice-ke", "alice-key2", "none", "bob"):
            with pytest.raises(AuthenticationError, match="needs an API key") as refused:
                cached(wrong)
            assert refused.value.code == "invalid_api_key"
        with pytest.raises(AuthenticationError):
            running.client(api_key="none").models.list()
        assert [each.id for each in running.client(api_key="alice-key").models.list()]


def status_of(running: PagedRunningServer, path: str, **headers: str) -> int:
    client = HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    client.request("GET", path, headers=headers)
    return client.getresponse().status


def test_with_keys_what_tells_of_clients_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("KEY", "alice-key")
    key = {"Authorization": "Bearer alice-key"}
    with paged_server(*LLAMA, "--api-key", "env:KEY", "--allowed-hosts", "a.example") as running:
        for path in ("/kv", "/kv/data", "/metrics"):
            assert status_of(running, path) == 401
            assert status_of(running, path, Authorization="Bearer bob-key") == 401
            assert status_of(running, path, **key) == 200
            assert status_of(running, path, **key, Host="a.example:80") == 200
            assert status_of(running, path, **key, Host="evil.example") == 403
        for path in ("/health", "/ready"):
            assert status_of(running, path, Host="evil.example") == 200
        monkeypatch.setattr(running.service.options, "open_status", True)
        for path in ("/kv", "/kv/data", "/metrics"):
            assert status_of(running, path) == 200
            assert status_of(running, path, Host="evil.example") == 403
        assert status_of(running, "/v1/models") == 401
