"""What a request is to the router, and which replica gets which prompt."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Scope

from paged_kv.server.options import ServerOptions
from paged_kv.server.replicas.placement import (
    MISSING,
    RUNNING,
    ForwardedRequest,
    Placement,
    Trail,
    cuts,
    forwarded_request,
    trail_of,
)
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


REPLICAS = ["a", "b", "c"]


def prompt(*parts: tuple[str, int]) -> Trail:
    return trail_of([b"", *[letter.encode() * length for letter, length in parts]])


def wanting(trail: Trail) -> ForwardedRequest:
    return ForwardedRequest({}, b"", trail)


def begin(placement: Placement, name: Any, asked: ForwardedRequest, replica: str) -> None:
    placement.expect(name, asked, replica)
    placement.begin(name, asked, replica)


def placed(placement: Placement, name: Any, trail: Trail) -> str:
    replica = placement.ranked(trail, REPLICAS)[0]
    begin(placement, name, wanting(trail), replica)
    return replica


def finished(placement: Placement, name: Any, trail: Trail) -> str:
    replica = placed(placement, name, trail)
    placement.end(name)
    return replica


def test_waiting_requests_count_more_than_a_prefix() -> None:
    placement = Placement()
    home = finished(placement, 1, prompt(("x", 4000)))
    busy = [placed(placement, letter, prompt((letter, 4000))) for letter in "mno"]
    assert sorted(busy) == REPLICAS
    placed(placement, "p", prompt(("p", 40_000)))
    crowded = max(REPLICAS, key=placement.waiting)
    elsewhere = prompt(("x", 4000), ("y", 100))
    chosen = placement.ranked(elsewhere, REPLICAS)[0]
    assert chosen == (home if home != crowded else chosen)
    assert chosen != crowded


def test_a_hot_prefix_spreads_as_its_prompts_come_at_once() -> None:
    placement = Placement()
    homes = [placed(placement, n, prompt(("s", 8000), (chr(97 + n), 300))) for n in range(12)]
    assert {homes.count(each) for each in REPLICAS} == {4}


def test_conversations_with_one_beginning_spread_the_more_they_are() -> None:
    """One comes after the other, and nothing waits anywhere."""
    placement = Placement()
    turns = [prompt(("s", 2000), (chr(200 + number), 6000)) for number in range(60)]
    homes = [finished(placement, number, trail) for number, trail in enumerate(turns)]
    assert len(set(homes[:10])) == 1
    assert min(homes.count(each) for each in REPLICAS) > 15
    for number, home in enumerate(homes):
        longer = prompt(("s", 2000), (chr(200 + number), 6000), ("answer", 900))
        assert finished(placement, number, longer) == home


def test_a_conversation_waits_while_to_compute_it_again_costs_others_more() -> None:
    placement = Placement()
    home = finished(placement, 1, prompt(("x", 4096)))
    begin(placement, 2, wanting(prompt(("y", 4096))), home)
    assert 4096 < placement.waiting(home) < MISSING * 4096
    assert placement.ranked(prompt(("x", 4200)), REPLICAS)[0] == home
    begin(placement, 3, wanting(prompt(("z", 4096))), home)
    assert placement.ranked(prompt(("x", 4200)), REPLICAS)[-1] == home


def test_an_answer_that_has_begun_costs_its_tokens_alone() -> None:
    placement = Placement()
    waiting = wanting(prompt(("x", 3000)))
    begin(placement, 1, waiting, "a")
    waiting.progress.has_begun = True
    assert placement.waiting("a") == RUNNING
    waiting.progress.has_ended = True
    assert placement.waiting("a") == 0


def test_replicas_that_are_gone_are_forgotten() -> None:
    placement = Placement()
    placement.use(REPLICAS)
    trail = prompt(("x", 4000))
    home = placed(placement, 1, trail)
    left = [each for each in REPLICAS if each != home]
    placement.use(left)
    assert not placement.beginnings
    assert placement.waiting(home) == 0
    placement.end(1)
    assert placement.waiting(home) == 0
    assert placement.ranked(trail, left)[0] in left
    placement.use(REPLICAS)
    assert placement.ranked(trail, REPLICAS) == sorted(REPLICAS)


def digests(ids: list[int]) -> Trail:
    return Trail(tuple(hash((1, *ids[: at + 1])) for at in range(len(ids))), 10_000)


TRAILS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(digests)


@given(st.lists(st.tuples(TRAILS, st.sampled_from(REPLICAS)), max_size=30))
def test_the_tree_is_bounded_and_keeps_beginnings_before_what_follows(
    added: list[tuple[Trail, str]],
) -> None:
    known = Placement(most_beginnings=8)
    for trail, replica in added:
        known.add(trail, replica)
        assert len(known.beginnings) <= 8
        ends = [*zip(trail.digests, cuts(), strict=False)]
        assert known.known(trail)[replica] == ends[-1][1]
        for other, _ in added:
            kept = [digest in known.beginnings for digest in other.digests]
            assert kept == sorted(kept, reverse=True), "a beginning is kept without an earlier one"
    assert sum(known.counts.values()) >= len(known.beginnings)
