"""Requests begin in order, each only when the pools can promise all that it may need."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from paged_kv.admission.admission import Admission, RequestImpossible
from paged_kv.admission.demand import Demand
from paged_kv.admission.policies import Optimistic, Policy, Reserve
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


def test_a_window_needs_at_most_its_ring() -> None:
    assert [FULL.bytes_for(tokens) for tokens in (0, 1, 256, 257)] == [0, 100, 100, 200]
    assert [WINDOWS.bytes_for(tokens) for tokens in (256, 512, 513, 2560)] == [150, 300, 400, 1100]


@pytest.mark.parametrize("pool", [FULL, WINDOWS])
def test_the_longest_sequence_fits_and_one_more_token_does_not(pool: PoolSize) -> None:
    for nbytes in (0, 99, 100, 149, 150, 299, 300, 950, 1000):
        longest = int(pool.tokens_in(nbytes))
        assert pool.bytes_for(longest) <= nbytes < pool.bytes_for(longest + 1)


def test_the_block_that_is_written_takes_more() -> None:
    pool = PoolSize(
        1000,
        0,
        (GroupSize(20, lambda tokens: -(-tokens // 256), written_bytes=80, written_blocks=2),),
    )
    assert [pool.bytes_for(tokens) for tokens in (0, 1, 256, 257, 513)] == [0, 80, 80, 180, 200]
    # The choices share three full blocks, and each writes two of its own at most.
    assert Demand(prompt_tokens=769, max_tokens=100, choices=3).bytes_in(pool) == 3 * 20 + 3 * 160


def test_the_first_full_block_may_take_more() -> None:
    size = GroupSize(
        20, lambda tokens: -(-tokens // 256), written_bytes=80, written_blocks=2, first_bytes=40
    )
    pool = PoolSize(1000, 0, (size,))
    assert [pool.bytes_for(tokens) for tokens in (0, 1, 256, 257, 513)] == [0, 80, 80, 200, 220]
    assert [pool.shared_bytes(tokens) for tokens in (255, 256, 768)] == [0, 40, 80]
    assert Demand(prompt_tokens=769, max_tokens=100, choices=3).bytes_in(pool) == 80 + 3 * 160


def test_blocks_beyond_those_that_memory_must_hold_may_take_less() -> None:
    size = GroupSize(20, lambda tokens: -(-tokens // 256), kept_blocks=3, left_bytes=1)
    pool = PoolSize(1000, 0, (size,))
    assert [pool.bytes_for(tokens) for tokens in (0, 256, 768, 769, 2560)] == [0, 20, 60, 61, 67]
    assert pool.tokens_in(100) == 43 * 256


def test_rings_alone_hold_any_length() -> None:
    ring = (group(100, most_blocks=3),)
    assert PoolSize(300, 0, ring).tokens_in(300) == math.inf
    assert PoolSize(299, 0, ring).tokens_in(299) == 512
    assert PoolSize(299, 0, ()).tokens_in(299) == math.inf


def test_choices_share_the_full_blocks_of_their_prompt() -> None:
    one, four = demand(1025, 100), demand(1025, 100, choices=4)
    assert one.bytes_in(FULL) == 500
    assert four.bytes_in(FULL) == 500 + 3 * 100
    # Each request computes the last token of its prompt.
    assert demand(1024, 100, choices=4).bytes_in(FULL) == 500 + 3 * 200
    ring = PoolSize(1000, 0, (GroupSize(50, lambda tokens: 2, is_ring=True),))
    assert four.bytes_in(ring) == 4 * 100


def test_requests_begin_while_there_is_room_for_what_they_become() -> None:
    line = [demand(tokens) for tokens in (1280, 1024, 257, 256)]
    requests = lined(line)
    # One block is left, and the last request would fit, but it came later.
    assert begun(requests, line) == [0, 1]
    requests.leave(line[0])
    assert begun(requests, line) == [2, 3]
    assert len(requests) == 0


def test_every_pool_must_have_room() -> None:
    line = [demand(512), demand(512)]
    requests = lined(line, FULL, PoolSize(300, 0, (group(100),)))
    assert begun(requests, line) == [0]
    requests.leave(line[0])
    requests.leave(line[0])
    assert begun(requests, line) == [1]


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


def test_who_waits_too_long_is_late() -> None:
    clock, line = Clock(), [demand(2560), demand(1), demand(2)]
    requests = lined(line[:2], clock=clock)
    clock.now = 3.0
    requests.arrive(line[2])
    assert begun(requests, line) == [0]
    assert requests.late() == []
    clock.now = 5.0
    assert requests.late() == [line[1]]
    assert len(requests) == 1
    for part in ("could not begin in 5 s", "requests that run (1)", "100%", "--max-kv-bytes"):
        assert part in requests.why_late()


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


def test_places_are_counted_by_choices() -> None:
    """Who needs more places than there are begins only when nothing else runs."""
    line = [demand(1, choices=choices) for choices in (3, 2, 6)]
    requests = lined(line, places=4)
    for number in range(3):
        assert begun(requests, line) == [number]
        requests.leave(line[number])


def test_who_is_computed_alone_waits_until_nothing_else_is_and_keeps_others_out() -> None:
    line = [demand(1), demand(1, is_alone=True), demand(1)]
    requests = lined(line)
    for number in range(3):
        assert begun(requests, line) == [number]
        requests.leave(line[number])


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


@pytest.mark.parametrize("policy", [Reserve(), Optimistic(lambda _: True)])
def test_who_awaits_a_prefix_begins_once_it_is_there_and_others_behind_it(policy: Policy) -> None:
    awaited = [True]
    requests = admission(FULL)
    requests.policy = policy
    requests.demand_of = lambda each: replace(
        each, awaits_prefix=each.prompt_tokens == 2 and awaited[0]
    )
    line = [demand(1), demand(2), demand(3)]
    for each in line:
        requests.arrive(each)
    assert begun(requests, line) == [0]
    awaited[0] = False
    assert begun(requests, line) == [1, 2]


def test_to_begin_a_request_needs_its_prompt_and_a_few_tokens() -> None:
    for request_of, nbytes in (
        (demand(256, 1000), 200),
        (demand(256, 0), 100),
        (demand(1025, 100, choices=4), 500 + 3 * 100),
        (demand(1000, 1000, shared_tokens=512), 500 - 200),
        (demand(1000, 1000, choices=4, shared_tokens=768), 500 + 3 * 200 - 300),
        # A prompt's last token is computed in a page of its own.
        (demand(512, 0, shared_tokens=512), 200 - 100),
    ):
        assert request_of.bytes_to_begin(FULL) == nbytes
