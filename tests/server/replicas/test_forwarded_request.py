"""What of a request tells the router where its prefix is."""

import json
import pickle
from typing import Any

import pytest
from starlette.types import Scope

from paged_kv.server.options import ServerOptions
from paged_kv.server.replicas.forwarded_request import ForwardedRequest, forwarded_request
from paged_kv.server.responses.kept_responses import KeptResponses

LONG = "A sentence that fills a prompt. " * 40


def scope_of(path: str = "/v1/chat/completions", key: str = "", method: str = "POST") -> Scope:
    headers = [(b"content-type", b"application/json")]
    if key:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    return {
        "type": "http",
        "method": method,
        "path": path,
        "headers": headers,
        "state": object(),
        "query_string": b"",
        "app": object(),
    }


def request(body: Any, path: str = "/v1/chat/completions", key: str = "") -> ForwardedRequest:
    return forwarded_request(scope_of(path, key), json.dumps(body).encode())


USER = {"role": "user", "content": LONG}


def test_clients_with_other_keys_share_no_trail() -> None:
    body = {"messages": [USER]}
    first, second = request(body, key="one").trail, request(body, key="two").trail
    assert first.digests[0] != second.digests[0]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 7}', b'{"input": [7]}', b"\xff"])
def test_what_a_replica_will_refuse_is_forwarded(body: bytes) -> None:
    forwarded = forwarded_request(scope_of(), body)
    assert forwarded.body == body
    assert not forwarded.place


@pytest.mark.parametrize("place", ["", "ab12cd34"])
def test_ids_that_a_server_makes_name_its_place(place: str) -> None:
    options = ServerOptions(max_responses=1, max_response_bytes=1, response_ttl=1.0)
    name = KeptResponses(options, place=place).new_name()
    for made in (f"resp_{name}", f"msg_{name}_0"):
        assert request({"previous_response_id": made}).place == place


def test_a_request_can_be_sent_to_another_process() -> None:
    """Of the scope, what belongs to this process stays here. The body is decoded already."""
    scope = scope_of()
    scope["headers"].append((b"content-encoding", b"gzip"))
    forwarded = forwarded_request(scope, json.dumps({"messages": [USER]}).encode())
    assert b"content-encoding" not in dict(forwarded.scope["headers"])
    assert pickle.loads(pickle.dumps(forwarded)) == forwarded
    assert "app" not in forwarded.scope
    assert "state" not in forwarded.scope
