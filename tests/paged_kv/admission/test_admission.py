"""Requests begin in order, each only when the pools can promise all that it may need."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from paged_kv.admission.admission import Admission, RequestImpossible
from paged_kv.admission.demand import Demand
from paged_kv.admission.policies import Optimistic
from paged_kv.admission.pool_size import GroupSize, PoolSize


def group(block_bytes: int, most_blocks: int = 1 << 60) -> GroupSize:
    return GroupSize(block_bytes, lambda tokens: min(-(-tokens // 256), most_blocks))


FULL = PoolSize(1000, 0, (group(100),))
WINDOWS = PoolSize(1000, 100, (group(100), group(50, most_blocks=2)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def admission(
    *pools: PoolSize, clock: Clock | None = None, patience_s: float = 5.0, places: int = 100
) -> Admission[Demand]:
    """Requests are represented by their demands."""
    return Admission(lambda each: each, patience_s, places, clock or Clock(), list(pools))


def lined(line: list[Demand], *pools: PoolSize, **options: Any) -> Admission[Demand]:
    """Requests that have arrived."""
    requests = admission(*pools or [FULL], **options)
    for each in line:
        requests.arrive(each)
    return requests


def begun(requests: Admission[Demand], line: list[Demand]) -> list[int]:
    """Those of the line that begin now."""
    numbers = {id(each): number for number, each in enumerate(line)}
    return [numbers[id(each)] for each in iter(requests.next, None)]


def demand(tokens: int, max_tokens: int = 0, **others: Any) -> Demand:
    """An equal request is still another request."""
    return Unlike(tokens, max_tokens, **others)


@dataclass(frozen=True, eq=False)
class Unlike(Demand):
    pass


def test_of_the_tokens_asked_for_so_many_fit_as_are_let_in() -> None:
    requests = admission(FULL)
    for asked, fitting in (
        (demand(2000, 560), 560),
        (demand(2000, 2**31 - 1), 560),
        (demand(2000, 0), 0),
        (demand(2560, 5), 0),
        (demand(1, 5000, choices=3), 767),
    ):
        assert requests.fitting_tokens(asked) == fitting
        if 0 < fitting < asked.max_tokens:
            requests.arrive(replace(asked, max_tokens=fitting))
            with pytest.raises(RequestImpossible):
                requests.arrive(replace(asked, max_tokens=fitting + 1))


def test_what_can_never_fit_is_refused_when_it_arrives() -> None:
    requests = lined([demand(2560), demand(1)])
    with pytest.raises(RequestImpossible, match="2000 of the prompt and max_tokens=561, and at mo"):
        requests.arrive(demand(2000, 561))
    with pytest.raises(RequestImpossible, match="for each of 3 choices"):
        requests.arrive(demand(2000, 560, choices=3))
    assert len(requests) == 2
    # The slack of slabs is promised to nobody.
    assert len(lined([demand(2048)], WINDOWS)) == 1
    with pytest.raises(RequestImpossible):
        lined([demand(2049)], WINDOWS)


def test_without_patience_what_fits_begins_and_the_rest_is_late_at_once() -> None:
    line = [demand(2560), demand(1)]
    requests = lined(line, patience_s=0)
    assert begun(requests, line) == [0]
    assert requests.late() == [line[1]]


def test_who_leaves_the_line_lets_others_pass() -> None:
    line = [demand(2000), demand(2560), demand(200)]
    requests = lined(line)
    assert begun(requests, line) == [0]
    requests.leave(line[1])
    assert begun(requests, line) == [2]
    requests.leave(line[0])
    requests.leave(line[2])
    assert requests.is_idle


def test_a_promise_is_renewed_when_more_is_known() -> None:
    asked = {"a": Demand(0, 0, is_alone=True), "b": Demand(256, 0)}
    requests: Admission[str] = Admission(asked.__getitem__, 5.0, pools=[FULL])
    requests.arrive("a")
    requests.arrive("b")
    assert requests.next() == "a"
    assert requests.next() is None
    asked["a"] = Demand(2304, 0)
    requests.renew("a")
    assert requests.next() == "b"
    asked["a"] = Demand(2561, 0)
    with pytest.raises(RequestImpossible):
        requests.renew("a")


def test_optimistic_asks_what_is_free_now_and_one_choice_must_fit_alone() -> None:
    asked: list[Demand] = []

    def fits(each: Demand) -> bool:
        asked.append(each)
        return len(asked) < 2

    requests = admission(FULL)
    requests.policy = Optimistic(fits)
    line = [demand(1, 2000, choices=5), demand(1, 2000), demand(1, 2000)]
    for each in line:
        requests.arrive(each)
    # Nothing else runs, so the first begins in any case.
    assert begun(requests, line) == [0, 1]
    assert asked == line[1:]
    with pytest.raises(RequestImpossible):
        requests.arrive(demand(2000, 561))
