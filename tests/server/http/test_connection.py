"""Clients that do not read, hold connections, or end their side."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from typing import Any

import pytest

from paged_kv.server.http.connection import MOST_EXTRA
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    paged_server,
    wait_until,
    with_small_model,
)
from tests.support.tiny_model import asked

MOST = 8
GO_ON = {"0": -1000}


@pytest.fixture(scope="module")
def running() -> Iterator[PagedRunningServer]:
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", "64MB"]
    limits = ["--max-connections", str(MOST), "--header-timeout", "1", "--write-timeout", "1"]
    with with_small_model(), paged_server(*options, *limits) as server:
        # Connections inherit it: a client that does not read is noticed after fewer bytes.
        server.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield server


def connected(running: PagedRunningServer) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE_S)
    client.connect(("127.0.0.1", running.port))
    return client


def completion(**body: Any) -> bytes:
    """The bytes of a request."""
    content = json.dumps({"prompt": "import os\n", "logit_bias": GO_ON, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def request(path: str, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode()


def answer_of(client: socket.socket) -> tuple[int, bytes]:
    """Status and content of the next answer; http.client leaves out interim ones."""
    with HTTPResponse(client) as answer:
        answer.begin()
        return answer.status, answer.read()


def connections(running: PagedRunningServer) -> set[Any]:
    """The open ones."""
    return running.server._uvicorn.server_state.connections


def test_who_holds_the_places_of_probes_too_loses_the_oldest(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = running.server._uvicorn.config.http_protocol_class
    monkeypatch.setattr(kind, "header_timeout_s", PATIENCE_S)
    with ExitStack() as stack:
        for _ in range(MOST + 2 * MOST_EXTRA):
            client = stack.enter_context(connected(running))
            client.sendall(b"GET /health")
            assert asked(running, "/health")[0] == 200
        wait_until(lambda: len(connections(running)) <= MOST + MOST_EXTRA)
    wait_until(lambda: not connections(running))


def test_a_body_that_never_ends_keeps_no_place(running: PagedRunningServer) -> None:
    with connected(running) as client:
        client.sendall(request("/health", "Content-Length: 1000000\r\n"))
        assert answer_of(client)[0] == 200
        client.settimeout(0.05)
        for _ in range(int(PATIENCE_S / 0.05)):
            try:
                client.sendall(b" ")
                if client.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except OSError:
                return
        raise AssertionError("the connection is open")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.slow
def test_a_completion_that_nobody_reads_ends(running: PagedRunningServer, stream: bool) -> None:
    before = running.service.metrics.finished["abort"]
    # The answer of a stream is long. The others are sent behind pages that nobody reads.
    body = completion(stream=True, max_tokens=1900) if stream else completion(max_tokens=1)
    with connected(running) as client:
        client.sendall(b"" if stream else request("/kv") * 100)
        client.sendall(body)
        assert client.recv(1) == b"H"
        if stream:
            wait_until(lambda: running.service.metrics.finished["abort"] > before)
        wait_until(lambda: not connections(running))
    assert_idle_pools_hold_nothing(running)


@pytest.mark.parametrize(
    "said",
    [
        completion(max_tokens=40),
        completion(max_tokens=40, stream=True),
        completion(max_tokens=40) + completion(max_tokens=1),
        request("/kv/data"),
    ],
)
@pytest.mark.slow
def test_a_client_that_has_ended_its_side_gets_its_answers(
    running: PagedRunningServer, said: bytes
) -> None:
    with connected(running) as client:
        client.sendall(said)
        client.shutdown(socket.SHUT_WR)
        for _ in range(said.count(b"HTTP/1.1")):
            status, content = answer_of(client)
            assert status == 200
            assert content
        assert client.recv(1) == b"", "the server ends its side after the last answer"


def test_a_client_that_ends_its_side_and_leaves_later_is_forgotten(
    running: PagedRunningServer,
) -> None:
    """Far from the end of its answer. The server asks whether it is there, which it need not
    understand."""
    before = running.service.metrics.finished["abort"]
    with connected(running) as client:
        client.sendall(completion(max_tokens=1900, n=4))
        wait_until(lambda: running.service.thread.jobs)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(12) == b"HTTP/1.1 100"
        assert running.service.thread.jobs
    wait_until(lambda: running.service.metrics.finished["abort"] > before)
    assert_idle_pools_hold_nothing(running)


def test_a_client_of_http_1_0_that_ends_its_side_has_left(running: PagedRunningServer) -> None:
    """Interim responses are no part of HTTP/1.0, and proxies that use it close as their clients
    leave."""
    before = running.service.metrics.finished["abort"]
    with connected(running) as client:
        client.sendall(completion(max_tokens=1900).replace(b"HTTP/1.1", b"HTTP/1.0"))
        wait_until(lambda: running.service.thread.jobs)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    wait_until(lambda: running.service.metrics.finished["abort"] > before)
    assert_idle_pools_hold_nothing(running)


def test_half_a_request_gets_no_place_when_its_client_ends(running: PagedRunningServer) -> None:
    for half in (b"GET /he", completion()[:-5]):
        with connected(running) as client:
            client.sendall(half)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
