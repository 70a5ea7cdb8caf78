"""A replay of states finds what a naive model does, and knowing the future pays."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.allocator.prefixes.eviction import (
    LEAST_WORTH,
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
)
from paged_kv.trace.state_replay import ForeseenStates, RankedStates, ends_of_states, replay_states
from tests.support.examples import examples
from tests.support.page_paths import paths, texts_of_prompts

UNLIMITED = 1000
POLICIES: list[EvictionPolicy] = [
    *(LEAST_WORTH, LeastRecentlyUsed(), LeastFrequentlyUsed(), FirstInFirstOut()),
]


class NaiveStates:
    """Evicts the state that was found or held least recently; each is the text before it."""

    def __init__(self, capacity: int) -> None:
        self.evicted = 0
        self.capacity = capacity
        self.texts: list[tuple[int, ...]] = []

    def find(self, path: Sequence[int]) -> int:
        known = [text for text in self.texts if tuple(path[: len(text)]) == text]
        longest = max(known, key=len, default=())
        if longest:
            self.texts.remove(longest)
            self.texts.append(longest)
        return len(longest)

    def hold(self, path: Sequence[int], end: int) -> None:
        text = tuple(path[:end])
        self.texts = [each for each in self.texts if each != text] + [text]
        while len(self.texts) > self.capacity:
            del self.texts[0]
            self.evicted += 1


def test_states_are_left_where_prompts_part_and_end() -> None:
    prompts = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5, 7], [1, 2], [], [6]]
    assert [ends for _, ends in ends_of_states(prompts)] == [[3], [2, 4], [5], [2], [], [1]]


@examples(200)
@given(texts=texts_of_prompts, capacity=st.integers(1, 6))
def test_least_recently_used_agrees_with_a_naive_model(
    texts: list[list[int]], capacity: int
) -> None:
    prompts = paths(texts)
    ranked, naive = RankedStates(capacity, LeastRecentlyUsed()), NaiveStates(capacity)
    assert replay_states(ranked, prompts) == replay_states(naive, prompts)


@examples(200)
@given(texts=texts_of_prompts, capacity=st.integers(1, 6))
def test_all_find_the_same_without_a_limit_and_no_more_with_one(
    texts: list[list[int]], capacity: int
) -> None:
    prompts = paths(texts)
    most = replay_states(NaiveStates(UNLIMITED), prompts)
    assert replay_states(ForeseenStates(UNLIMITED, prompts), prompts) == most
    assert replay_states(ForeseenStates(capacity, prompts), prompts) <= most
    for policy in POLICIES:
        assert replay_states(RankedStates(UNLIMITED, policy), prompts) == most
        assert replay_states(RankedStates(capacity, policy), prompts) <= most


@pytest.mark.parametrize(("capacity", "found"), [(1, 2), (2, 4)])
def test_foresight_keeps_what_comes_back(capacity: int, found: int) -> None:
    """The first two prompts come back after many others."""
    prompts = [[1, 2], [3, 4], *[[each, each + 50] for each in range(100, 140)], [1, 2], [3, 4]]
    assert replay_states(RankedStates(capacity, LeastRecentlyUsed()), prompts) == 0
    foreseen = ForeseenStates(capacity, prompts)
    # The state of the next prompt to come back is one of them, though all are held for a moment.
    assert replay_states(foreseen, prompts) == found
    assert foreseen.evicted == 42 - capacity + (capacity == 1)


def test_a_superseded_state_goes_first() -> None:
    """Two conversations grow a page a turn, in turns; two states fit."""
    some, others = list(range(10)), list(range(20, 30))
    prompts = [text[:end] for end in range(1, 10) for text in (some, others)]
    assert replay_states(RankedStates(2, LEAST_WORTH), prompts) == 2 * sum(range(1, 9))


def test_a_state_where_prompts_part_is_not_superseded() -> None:
    """A shared beginning, of which a first conversation ends and others go on elsewhere."""
    begin = [1, 2, 3]
    prompts = [begin, *[[*begin, each] for each in range(10, 20)]]
    states = RankedStates(2, LEAST_WORTH)
    assert replay_states(states, prompts) == 3 * 10
    assert states.find([*begin, 99]) == 3
