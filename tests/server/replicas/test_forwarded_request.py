"""What of a request tells the router where its prefix is."""

import json
import pickle
from argparse import Namespace
from itertools import takewhile
from typing import Any

import pytest
from starlette.types import Scope

from paged_kv.server.replicas.forwarded_request import (
    LEAST_CUT,
    ForwardedRequest,
    Trail,
    cuts,
    forwarded_request,
)
from paged_kv.server.responses.responses import KeptResponses

LONG = "A sentence that fills a prompt. " * 40
NAME = "0123456789abcdef" * 2


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


def trail(**body: Any) -> Trail:
    return request(body).trail


def common(first: Trail, second: Trail) -> int:
    pairs = zip(first.digests, second.digests, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


USER = {"role": "user", "content": LONG}
ASSISTANT = {"role": "assistant", "content": "An answer. " + LONG}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"messages": [USER]}, {"messages": [USER, ASSISTANT, USER]}),
        ({"input": [USER]}, {"input": [USER, ASSISTANT, USER]}),
        ({"system": LONG, "messages": [USER]}, {"messages": [USER, ASSISTANT], "system": LONG}),
        ({"prompt": LONG}, {"prompt": LONG + "and more " * 400}),
        ({"prompt": list(range(1000))}, {"prompt": list(range(3000))}),
        ({"tools": [{"name": LONG}], "messages": [USER], "seed": 1}, {"tools": [{"name": LONG}],
          "messages": [USER, ASSISTANT], "temperature": 0, "stream": True}),
    ],
)  # fmt: skip
def test_the_next_turn_goes_on_with_the_trail(first: Any, second: Any) -> None:
    earlier, later = trail(**first), trail(**second)
    assert len(later.digests) > len(earlier.digests) > 3
    # Of a prompt that is one text, only the last beginning may reach into what follows it.
    assert common(earlier, later) >= len(earlier.digests) - 1


def test_an_input_that_is_one_text_has_a_trail() -> None:
    assert trail(input=LONG).digests


@pytest.mark.parametrize(
    "other", [{"cache_salt": "b"}, {"model": "m2"}, {"tools": [{"name": "f"}]}]
)
def test_what_changes_the_prompt_changes_all_of_the_trail(other: dict[str, Any]) -> None:
    body = {"messages": [USER], "model": "m1", "cache_salt": "a"}
    assert not common(trail(**body), trail(**body | other))


def test_clients_with_other_keys_share_no_trail() -> None:
    body = {"messages": [USER]}
    first, second = request(body, key="one").trail, request(body, key="two").trail
    assert first.digests
    assert not common(first, second)


def test_trails_part_where_prompts_part() -> None:
    first = trail(messages=[USER, {"role": "user", "content": "x" * 4000}])
    second = trail(messages=[USER, {"role": "user", "content": "y" * 4000}])
    same = common(first, second)
    assert 0 < same < len(first.digests)
    at = [*takewhile(lambda end: end <= first.length, cuts())]
    known = len(LONG)
    assert at[same - 1] < known + 200 < at[same] + LEAST_CUT


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 7}', b'{"input": [7]}', b"\xff"])
def test_what_a_replica_will_refuse_is_forwarded(body: bytes) -> None:
    forwarded = forwarded_request(scope_of(), body)
    assert forwarded.body == body
    assert not forwarded.place


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"previous_response_id": f"resp_ab12cd34{NAME}", "input": "x"}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": f"msg_ab12cd34{NAME}_0"}]}),
        (f"/v1/responses/resp_ab12cd34{NAME}", {}),
        (f"/v1/responses/resp_ab12cd34{NAME}/input_items", {}),
    ],
)
def test_who_asks_for_a_kept_response_goes_to_its_replica(path: str, body: Any) -> None:
    assert request(body, path).place == "ab12cd34"


@pytest.mark.parametrize("place", ["", "ab12cd34"])
def test_ids_that_a_server_makes_name_its_place(place: str) -> None:
    options = Namespace(max_responses=1, max_response_bytes=1, response_ttl=1.0)
    name = KeptResponses(options, place=place).new_name()
    for made in (f"resp_{name}", f"msg_{name}_0"):
        assert request({"previous_response_id": made}).place == place


def test_a_request_can_be_sent_to_another_process() -> None:
    """Of the scope, what belongs to this process stays here."""
    forwarded = request({"messages": [USER]})
    assert pickle.loads(pickle.dumps(forwarded)) == forwarded
    assert "app" not in forwarded.scope
    assert "state" not in forwarded.scope
