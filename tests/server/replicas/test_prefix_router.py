"""What the router tells Ray Serve, without Ray."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

from paged_kv.server.replicas.front import PrefixRouter
from paged_kv.server.replicas.placement import RUNNING, ForwardedRequest, trail_of

pytestmark = pytest.mark.slow

REQUEST = ForwardedRequest({}, b"", trail_of([b"", b"x" * 4000]))


def router() -> PrefixRouter:
    made = PrefixRouter.__new__(PrefixRouter)  # Ray Serve gives it more than choosing needs
    made.initialize_state()
    return made


def replica_id(name: str) -> Any:
    return SimpleNamespace(unique_id=name)


def pending(request: ForwardedRequest, name: str) -> Any:
    metadata = SimpleNamespace(internal_request_id=name)
    return SimpleNamespace(args=[request], metadata=metadata, future=asyncio.Future())


async def chosen(made: PrefixRouter, asked: Any, names: str = "abc") -> str:
    candidates: Any = [SimpleNamespace(replica_id=replica_id(name)) for name in names]
    ranks = await made.choose_replicas(candidates, asked)
    assert all(len(rank) == 1 for rank in ranks)
    return "".join(rank[0].replica_id.unique_id for rank in ranks)


def test_it_prefers_the_replica_with_the_prefix() -> None:
    async def run() -> None:
        made = router()
        first = pending(REQUEST, "1")
        home = (await chosen(made, first))[0]
        made.on_request_routed(first, replica_id("b"), None)
        made.on_request_completed(replica_id("b"), "1")
        assert made._placement.waiting(home) == 0
        assert (await chosen(made, pending(REQUEST, "2")))[0] == "b"

    asyncio.run(run())


def test_what_is_being_chosen_counts_already() -> None:
    """Others that come at once shall not all go to the same replica."""

    async def run() -> None:
        made = router()
        homes = {(await chosen(made, pending(REQUEST, str(number))))[0] for number in range(3)}
        assert homes == {"a", "b", "c"}

    asyncio.run(run())


def test_who_leaves_before_a_replica_takes_the_request_counts_no_longer() -> None:
    async def run() -> None:
        made = router()
        asked = pending(REQUEST, "1")
        home = (await chosen(made, asked))[0]
        assert made._placement.waiting(home) == RUNNING + 4000
        asked.future.cancel()
        await asyncio.sleep(0)
        assert made._placement.waiting(home) == 0

    asyncio.run(run())


def test_a_kept_response_is_asked_for_where_it_is() -> None:
    async def run() -> None:
        made = router()
        assert await chosen(made, pending(replace(REQUEST, place="b"), "1")) == "b"
        everywhere = await chosen(made, pending(replace(REQUEST, place="gone"), "2"))
        assert sorted(everywhere) == ["a", "b", "c"]

    asyncio.run(run())


def test_replicas_that_have_refused_are_avoided_while_there_are_others() -> None:
    async def run() -> None:
        made = router()
        asked = replace(REQUEST, avoided=frozenset("ac"))
        assert await chosen(made, pending(asked, "1")) == "b"
        asked = replace(REQUEST, avoided=frozenset("abc"))
        assert sorted(await chosen(made, pending(asked, "2"))) == ["a", "b", "c"]
        assert await chosen(made, pending(asked, "3"), names="") == ""

    asyncio.run(run())
