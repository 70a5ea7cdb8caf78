"""Any input gets an answer in OpenAI's form, and the next request is served."""

import gzip
import json
import socket
import sys
import zlib
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from paged_kv.server.http.request_body import _ZSTD, BodyDecoder
from tests.support.bad_requests import CHAT, GOOD, TEXT, bad_requests
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    paged_server,
    with_small_model,
)

LIMIT, MOST_TOKENS = 200_000, 300
BAD = bad_requests()


@pytest.fixture(scope="module")
def running() -> Iterator[PagedRunningServer]:
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-tokens", "1"]
    limits = ["--max-body-bytes", str(LIMIT), "--max-connections", "20"]
    limits += ["--max-prompt-tokens", str(MOST_TOKENS)]
    with with_small_model(), paged_server(*options, "--max-kv-bytes", "64MB", *limits) as server:
        yield server
        assert_idle_pools_hold_nothing(server)


@pytest.fixture
def client(running: PagedRunningServer) -> Iterator[HTTPConnection]:
    opened = HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    yield opened
    opened.close()


def post(
    client: HTTPConnection, path: str, content: bytes, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Status and body of an answer."""
    client.request("POST", path, content, headers or {})
    response = client.getresponse()
    return response.status, json.loads(response.read())


def assert_serves(client: HTTPConnection, path: str = TEXT) -> None:
    status, answer = post(client, path, json.dumps(GOOD[path]).encode())
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"


def assert_refused(answer: Any, status: int, param: str | None = None) -> None:
    """The form of an error, and the field that it names."""
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert 0 < len(error["message"]) < 1000
    assert error["code"]
    assert (error["param"] or "").partition(".")[0] == (param or "")


@pytest.mark.parametrize("group", list(BAD))
def test_bad_requests_are_refused_and_the_next_is_served(
    group: str, client: HTTPConnection, running: PagedRunningServer
) -> None:
    for bad in BAD[group]:
        status, answer = post(client, bad.path, bad.content)
        assert status == bad.status, (bad, answer)
        assert_refused(answer, bad.status, bad.param)
    assert_serves(client)
    assert running.service.is_healthy


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": None, "temperature": None, "stop": None, "logit_bias": None, "n": None},
        {"seed": -1, "temperature": 1.0},
        {"seed": 2**64 - 1, "temperature": 1e-320},
        {"top_k": 4095, "temperature": 0.7, "min_p": 1, "top_p": 0, "xtc_probability": 1},
        {"logit_bias": {"0": 1e4, "4095": -1e4}, "repetition_penalty": 1e4},
        {"repetition_penalty": 1.1, "repetition_context_size": 2**31 - 1},
        {"presence_penalty": -2, "frequency_penalty": 2, "presence_context_size": 0},
        {"stop": "", "cache_salt": "s", "user": "somebody", "best_of": 1, "store": True},
        {"metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_key": "a"},
        {"echo": False, "suffix": "", "response_format": {"type": "text"}, "tool_choice": "auto"},
        {"tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]},
        {"functions": None, "guided_json": None, "of_no_interface": None},
        {"stop": ["\n\n", "", "\u00e9\U0001f600"]},
        {"stream_options": {"include_obfuscation": False}, "stream": False},
        {"draft_model": "default_model", "num_draft_tokens": 0},
    ],
)
def test_legal_requests_are_served(more: dict[str, Any], client: HTTPConnection) -> None:
    for path in (TEXT, CHAT):
        status, answer = post(client, path, json.dumps(GOOD[path] | more).encode())
        assert status == 200, answer


def test_pages_of_other_origins_read_answers_and_errors_and_no_statistics(
    client: HTTPConnection,
) -> None:
    for method, path, content in (
        *(("POST", TEXT, json.dumps(GOOD[TEXT])), ("POST", TEXT, "{}"), ("PUT", TEXT, "")),
        *(("GET", "/v1/models/none", ""), ("GET", "/none", ""), ("GET", "/kv/data", "")),
    ):
        client.request(method, path, content, {"Origin": "http://other.example"})
        response = client.getresponse()
        response.read()
        allowed = None if path == "/kv/data" else "*"
        assert response.getheader("Access-Control-Allow-Origin") == allowed, path


def test_a_long_body_is_refused_and_a_shorter_one_is_not(
    running: PagedRunningServer, client: HTTPConnection
) -> None:
    filled = json.dumps(GOOD[TEXT] | {"user": "u" * (LIMIT - 100)}).encode()
    assert post(client, TEXT, filled)[0] == 200
    for length in (LIMIT + 1, 3 * LIMIT):
        status, answer = post(client, TEXT, b" " * length)
        assert status == 413
        assert_refused(answer, 413)
        assert "--max-body-bytes" in answer["error"]["message"]
        assert_serves(client)
    # With chunks nobody knows the length before the end.
    client.request("POST", TEXT, iter([b" " * 1000] * 400), encode_chunked=True,
                   headers={"Transfer-Encoding": "chunked"})  # fmt: skip
    assert client.getresponse().status == 413


def compressed(content: bytes, encoding: str) -> bytes:
    if encoding == "zstd":
        zstd = pytest.importorskip(_ZSTD)
        return bytes(zstd.compress(content))
    return gzip.compress(content) if encoding == "gzip" else zlib.compress(content)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_a_compressed_body_is_decoded_up_to_the_limit(
    encoding: str, client: HTTPConnection
) -> None:
    def sent(content: bytes) -> tuple[int, Any]:
        return post(client, CHAT, content, {"Content-Encoding": encoding})

    good = json.dumps(GOOD[CHAT]).encode()
    status, answer = sent(compressed(good, encoding))
    assert status == 200, answer
    # No more is made of a bomb than the limit says.
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        decode = BodyDecoder.decode

        def noted(decoder: BodyDecoder, part: bytes, most: int) -> bytes:
            decoded = decode(decoder, part, most)
            made.append(len(decoded))
            return decoded

        patched.setattr(BodyDecoder, "decode", noted)
        assert sent(compressed(b" " * (50 * LIMIT), encoding))[0] == 413
    assert sum(made) == LIMIT + 1
    whole = compressed(good, encoding)
    for wrong in (good, whole[:-5], whole + b"x", b"", whole[:9] + b"\xff" * 99):
        status, answer = sent(wrong)
        assert status == 400, wrong
        assert_refused(answer, 400)
        assert encoding in answer["error"]["message"]
    assert_serves(client, CHAT)


def test_an_encoding_that_is_not_known_says_which_are(
    client: HTTPConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, _ZSTD, None)
    for encoding, named in (("br", "gzip"), ("gzip, zstd", "gzip"), ("zstd", "paged-kv[zstd]")):
        client.request("POST", CHAT, b"{}", {"Content-Encoding": encoding})
        response = client.getresponse()
        answer = json.loads(response.read())
        assert (response.status, answer["error"]["code"]) == (415, "unsupported_encoding")
        assert named in answer["error"]["message"]
        assert "gzip" in response.headers["Accept-Encoding"]
    assert_serves(client, CHAT)


def said_to(port: int, said: bytes) -> tuple[HTTPResponse, bytes]:
    """The server's answer to these bytes, as status and content."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as raw:
        raw.sendall(said)
        with HTTPResponse(raw) as answer:
            answer.begin()
            return answer, answer.read()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"


def test_more_connections_than_are_allowed_are_told_so(running: PagedRunningServer) -> None:
    def opened() -> socket.socket:
        return socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S)

    held = [opened() for _ in range(20)]
    try:
        refused, content = said_to(running.port, b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        assert refused.status == 503
        assert refused.headers["Retry-After"]
        assert b"--max-connections" in content
    finally:
        for each in held:
            each.close()


@pytest.mark.slow
def test_slow_clients_are_told_so() -> None:
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-tokens", "1"]
    limits = ["--header-timeout", "0.2", "--body-timeout", "0.2"]
    with with_small_model(), paged_server(*options, *limits) as running:
        for said in (b"", b"POST /v1/comp", HEAD, HEAD + b"Content-Length: 20\r\n\r\n{"):
            answer, content = said_to(running.port, said)
            assert answer.status == 408, said
            assert b"0.2 s" in content
        assert_serves(HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S))


def test_a_request_whose_sampling_fails_is_refused_and_no_other(
    running: PagedRunningServer, client: HTTPConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schema cannot foresee this error, which the generation thread raises inside its guard."""
    from paged_kv.server.engine import sampling

    def broken(*_: Any) -> Any:
        raise OverflowError("out of range")

    with monkeypatch.context() as patched:
        patched.setattr(sampling, "logits_processors", broken)
        status, answer = post(client, TEXT, json.dumps(GOOD[TEXT]).encode())
        assert status == 400
        assert "out of range" in answer["error"]["message"]
    assert_serves(client)


def test_a_step_that_fails_ends_its_requests_and_no_others(
    running: PagedRunningServer, client: HTTPConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paged_kv.server.engine.rows import Rows

    def broken(*_: Any) -> Any:
        raise RuntimeError("a secret")

    with monkeypatch.context() as patched:
        patched.setattr(Rows, "step", broken)
        status, answer = post(client, TEXT, json.dumps(GOOD[TEXT]).encode())
        assert status == 500
        assert_refused(answer, 500)
        assert "secret" not in answer["error"]["message"]
    assert_serves(client)
