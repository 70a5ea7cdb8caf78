"""Requests begin in order, and only when there is room for all that they may become."""

import math

import pytest

from paged_kv.integrations.admission import (
    Admission,
    GroupSize,
    PoolSize,
    RequestImpossible,
    ServerBusy,
)


def group(block_bytes: int, most_blocks: int = 1 << 60) -> GroupSize:
    return GroupSize(block_bytes, lambda tokens: min(-(-tokens // 256), most_blocks))


FULL = PoolSize(1000, 0, (group(100),))
WINDOWS = PoolSize(1000, 100, (group(100), group(50, most_blocks=2)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def admission(*pools: PoolSize, clock: Clock | None = None) -> Admission[int]:
    """Requests are the numbers of their tokens; negative ones need no promise."""

    def tokens_of(request: int) -> int | None:
        return None if request < 0 else request

    return Admission(tokens_of, 5.0, clock or Clock(), list(pools))


@pytest.mark.parametrize(
    ("pool", "tokens", "nbytes"),
    [
        (FULL, 0, 0),
        (FULL, 1, 100),
        (FULL, 256, 100),
        (FULL, 257, 200),
        (WINDOWS, 256, 150),
        (WINDOWS, 512, 300),
        (WINDOWS, 513, 400),
        (WINDOWS, 2560, 1100),
    ],
)
def test_a_window_needs_at_most_its_ring(pool: PoolSize, tokens: int, nbytes: int) -> None:
    assert pool.bytes_for(tokens) == nbytes


@pytest.mark.parametrize("nbytes", [0, 99, 100, 149, 150, 299, 300, 950, 1000])
@pytest.mark.parametrize("pool", [FULL, WINDOWS])
def test_the_longest_sequence_fits_and_one_more_token_does_not(pool: PoolSize, nbytes: int) -> None:
    longest = int(pool.tokens_in(nbytes))
    assert pool.bytes_for(longest) <= nbytes < pool.bytes_for(longest + 1)


def test_rings_alone_hold_any_length() -> None:
    ring = (group(100, most_blocks=3),)
    assert PoolSize(300, 0, ring).tokens_in(300) == math.inf
    assert PoolSize(299, 0, ring).tokens_in(299) == 512
    assert PoolSize(299, 0, ()).tokens_in(299) == math.inf


def test_requests_begin_while_there_is_room_for_what_they_become() -> None:
    requests = admission(FULL)
    for tokens in (1280, 1024, 257, 256):
        requests.arrive(tokens)
    assert requests.next() == 1280
    requests.promise("a", 1280)
    assert requests.next() == 1024
    requests.promise("b", 1024)
    # One block is left, and the last of them would fit: but it came later.
    assert requests.next() is None
    requests.end("a")
    assert requests.next() == 257
    requests.promise("c", 257)
    assert requests.next() == 256
    assert requests.next() is None
    assert len(requests) == 0


def test_every_pool_must_have_room() -> None:
    requests = admission(FULL, PoolSize(300, 0, (group(100),)))
    requests.arrive(512)
    assert requests.next() == 512
    requests.promise("a", 512)
    requests.arrive(512)
    assert requests.next() is None
    requests.end("a")
    requests.end("a")
    assert requests.next() == 512


def test_what_can_never_fit_is_named_at_once() -> None:
    requests = admission(FULL)
    requests.promise("a", 2560)
    requests.arrive(2561)
    # It does not wait: it would for ever.
    assert requests.next() == 2561
    requests.require_possible(2000, 560)
    expected = (
        r"2561 tokens were asked, 2000 of the prompt and max_tokens=561, and 2560 are possible: "
        r"shorten the prompt, lower max_tokens, or .* --max-kv-bytes"
    )
    with pytest.raises(RequestImpossible, match=expected) as refused:
        requests.require_possible(2000, 561)
    assert refused.value.status == 400
    with pytest.raises(RequestImpossible, match="2556 are possible"):
        requests.require_possible(2000, 560, extra=4)


def test_who_waits_too_long_is_late() -> None:
    clock = Clock()
    requests = admission(FULL, clock=clock)
    requests.promise("a", 2560)
    requests.arrive(1)
    clock.now = 3.0
    requests.arrive(2)
    assert requests.next() is None
    assert requests.late() == []
    clock.now = 5.0
    assert requests.late() == [1]
    assert len(requests) == 1
    busy = requests.busy()
    assert isinstance(busy, ServerBusy)
    assert (busy.status, busy.retry_after_s) == (503, 5)
    for part in ("no memory became free in 5 s", "1 requests", "100%", "--max-kv-bytes"):
        assert part in str(busy)


def test_what_needs_no_promise_begins_when_it_is_first() -> None:
    requests = admission(FULL)
    requests.promise("a", 2560)
    for request in (-1, 1, -2):
        requests.arrive(request)
    assert requests.next() == -1
    assert requests.next() is None
