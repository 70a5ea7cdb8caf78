"""Responses are kept for their owners, up to a number, an age and a size."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paged_kv.server.http.api_errors import APIError
from paged_kv.server.options import ServerOptions
from paged_kv.server.responses.kept_responses import KeptResponses, Turn
from paged_kv.server.responses.responses import read_responses


def kept(clock: Callable[[], float] = lambda: 0.0, **limits: Any) -> KeptResponses:
    options = ServerOptions(max_responses=100, max_response_bytes=1000, response_ttl=60.0)
    return KeptResponses(replace(options, **limits), clock)


def turn(name: str, nbytes: int = 10, previous: Turn | None = None) -> Turn:
    return Turn(
        previous, [{"id": f"in {name}"}], {"id": name, "output": [{"id": f"out {name}"}]}, nbytes
    )


def names(store: KeptResponses, owner: Any = None) -> str:
    """Of those that are found, without touching others."""
    return "".join(name for own, name in store._turns if own == owner)


def test_the_least_recently_used_goes_first() -> None:
    store = kept(max_responses=2)
    for name in "ab":
        store.keep(None, turn(name))
    store.get(None, "a")
    store.keep(None, turn("c"))
    assert names(store) == "ac"
    assert store.nbytes == 20
    with pytest.raises(APIError) as gone:
        store.get(None, "b")
    assert gone.value.status == 404


def test_items_are_found_by_their_owner_while_their_turn_is_kept() -> None:
    store = kept()
    store.keep("alice", turn("a"))
    later = turn("b", previous=store.get("alice", "a"))
    store.keep("alice", later)
    assert store.items("alice", ["out a"]) == {"out a": {"id": "out a"}}
    assert [item["id"] for item in later.all_inputs()] == ["in a", "out a", "in b"]
    with pytest.raises(APIError):
        store.items("bob", ["out a"])
    store.delete("alice", "a")
    with pytest.raises(APIError):
        store.items("alice", ["in b", "out a"])
    assert store.items("alice", ["in b"]) == {"in b": {"id": "in b"}}


def test_an_item_is_found_while_any_turn_that_has_it_is_kept() -> None:
    """Clients name items of earlier answers in every turn, and delete the latest to ask again."""
    store = kept()
    store.keep("alice", turn("a"))
    again = turn("b")
    again.inputs.append({"id": "out a"})
    store.keep("alice", again)
    store.delete("alice", "b")
    assert store.items("alice", ["out a"]) == {"out a": {"id": "out a"}}


def test_what_is_continued_counts_as_read() -> None:
    """Long prompts keep short ones from no thread, whatever a client sends of them."""
    store = kept()
    first = Turn(None, [], {"id": "a", "output": []}, 600)
    store.keep(None, Turn(first, [], {"id": "b", "output": []}, 300))
    for more, nbytes in (({"previous_response_id": "b"}, 900), ({}, 0)):
        content = json.dumps({"input": "a", **more}).encode()
        assert 0 <= read_responses(store, content, None).nbytes - nbytes < 200


def test_owners_do_not_find_each_others() -> None:
    store = kept()
    store.keep("alice", turn("a"))
    with pytest.raises(APIError):
        store.get("bob", "a")
    with pytest.raises(APIError):
        store.delete("bob", "a")
    store.delete("alice", "a")
    assert store.nbytes == 0


def test_old_ones_are_forgotten() -> None:
    now = 0.0
    store = kept(lambda: now, response_ttl=5.0)
    store.keep(None, turn("a"))
    now = 5.0
    store.get(None, "a")
    now = 5.1
    with pytest.raises(APIError):
        store.get(None, "a")
    store.keep(None, turn("b"))
    now = 11.0
    store.keep(None, turn("c"))
    assert names(store) == "c"


def test_what_is_continued_counts_until_nothing_continues_it() -> None:
    store = kept()
    store.keep(None, turn("a", 400))
    store.keep(None, turn("b", 400, store.get(None, "a")))
    assert store.get(None, "b").all_items() == [
        {"id": f"{where} {name}"} for name in "ab" for where in ("in", "out")
    ]
    store.delete(None, "a")
    assert store.nbytes == 800
    # Room for it is there when both have gone.
    store.keep(None, turn("c", 400))
    assert (names(store), store.nbytes) == ("c", 400)


def test_what_is_too_large_drives_out_no_other() -> None:
    store = kept()
    store.keep(None, turn("a"))
    store.keep(None, turn("b", 1001))
    assert (names(store), store.nbytes) == ("a", 10)
    none = kept(max_responses=0)
    none.keep(None, turn("a"))
    assert names(none) == ""
