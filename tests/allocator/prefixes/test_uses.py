"""Uses of cached entries: each counts half as much after a while that is measured."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.allocator.prefixes.eviction import LeastWorth
from paged_kv.allocator.prefixes.uses import Use, UseHistory
from tests.support.examples import examples


def advance(history: UseHistory, ticks: int) -> None:
    for _ in range(ticks):
        history.now()


def test_a_use_counts_half_after_twice_the_mean_time_until_a_use() -> None:
    history = UseHistory()
    use = history.first()
    assert (use.recent, use.half_life) == (1, 0)
    advance(history, 9)
    use = history.again(use)
    assert use.half_life == 20
    assert use.recent == pytest.approx(1 + 2**-0.5)
    advance(history, 29)
    use = history.again(use)
    assert use.half_life == 40
    assert use.recent == pytest.approx(1 + (1 + 2**-0.5) * 2 ** -(30 / 40))
    assert (use.first, use.last, use.times) == (1, 41, 3)


def test_storing_again_is_no_use_and_changes_no_worth() -> None:
    history = UseHistory()
    use = history.again(history.first())
    before = LeastWorth().rank(use)
    advance(history, 3)
    stored = history.stored(use)
    assert (stored.times, stored.half_life) == (use.times, use.half_life)
    assert stored.last > use.last
    assert LeastWorth().rank(stored) == pytest.approx(before)


def test_uses_before_an_eviction_count() -> None:
    history = UseHistory()
    use = history.again(history.again(history.first("a")))
    history.forget("a", use, 10)
    again = history.first("a", position=7)
    assert (again.first, again.times, again.position) == (again.last, 1, 7)
    assert again.recent > 2
    assert history.first("b").recent == 1
    assert history.first("a").recent == 1  # it was taken out


def test_what_is_remembered_is_bounded() -> None:
    """The latest ones stay."""
    for others, kept in ((0, 4), (2, 12), (1 << 20, 1 << 15)):
        history = UseHistory()
        count = kept + 5
        for key in range(count):
            history.forget(key, Use(1, 1), others)
        assert list(history._gone) == list(range(5, count))


@given(st.lists(st.integers(0, 1 << 40), max_size=30))
@examples(60)
def test_whatever_the_times_are_a_worth_is_a_number(pauses: list[int]) -> None:
    history = UseHistory()
    use = history.first()
    clock: Any = history
    for pause in pauses:
        clock._clock = iter(range(use.last + pause + 1, use.last + pause + 3))
        use = history.again(use)
        assert 1 <= use.recent <= use.times
        assert use.last <= LeastWorth().rank(use) < 2**50
        clock._clock = iter(range(use.last + 1, 1 << 62))
