"""Snapshots of recurrent layers: the positions where they hit, and the order of eviction."""

import weakref
from collections import abc
from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paged_kv import PagePool, Sequence
from paged_kv.allocator.prefixes.eviction import Use
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.prefix.snapshots import Snapshots, live_snapshots
from paged_kv.steps.batch import Batch
from tests.support.examples import examples

TEXT = list(range(1000))


@dataclass
class State:
    """The state of a layer without pages after so many tokens."""

    tokens: int
    nbytes: int = 100


class Hybrid:
    """Prefixes of a model with one layer of pages, and one with a state."""

    def __init__(self, page_format: Any = "fp16") -> None:
        self.pool = PagePool(1, max_bytes=1 << 22, page_format=page_format)
        self.prefixes = PrefixCache(self.pool, has_states=True)

    def sequence(self, tokens: list[int]) -> Sequence:
        sequence = Sequence(self.pool)
        self.write(sequence, tokens)
        return sequence

    def write(self, sequence: Sequence, tokens: list[int]) -> None:
        numbers = mx.repeat(mx.array(tokens, mx.float32)[None, None, :, None], 32, axis=-1)
        Batch.of(self.pool, [sequence]).append(0, numbers, numbers)

    def insert(self, tokens: list[int], sequence: Sequence) -> None:
        """Insert with the present state, which is that after all tokens of the sequence."""
        self.prefixes.insert("", tokens, sequence, [State(sequence.length)])

    def found(self, tokens: list[int]) -> int:
        """The number of a prompt's tokens that are found; checks that the state is that after these
        tokens."""
        prefix = self.prefixes.fetch("", [*tokens, -1], self.pool.page_format)
        states: Any = prefix.states
        assert [each.tokens for each in states or []] == ([prefix.num_tokens] if states else [])
        return prefix.num_tokens


def test_a_state_is_of_the_tokens_that_it_is_found_behind() -> None:
    """A caller that inserts a part of a sequence's tokens has no state for the end of that part."""
    hybrid = Hybrid()
    sequence = hybrid.sequence(TEXT[:600])
    for part in (600, 512, 300, 256, 1):
        hybrid.insert(TEXT[:part], sequence)
        assert hybrid.found(TEXT[:part]) == (600 if part == 600 else 0)
    assert hybrid.found(TEXT) == 600


@pytest.mark.parametrize("page_format", ["fp16", "q8", "q4", ("fp16", "q8"), ("q4", "fp16")])
def test_no_state_within_a_quantised_page_is_taken(page_format: Any) -> None:
    """A sequence is inserted again and again as it grows, and its full pages are quantised."""
    hybrid = Hybrid(page_format)
    sequence = Sequence(hybrid.pool)
    ends = (45, 256, 300, 511, 590, 600)
    for end in ends:
        hybrid.write(sequence, TEXT[sequence.length : end])
        hybrid.insert(TEXT[:end], sequence)
        assert hybrid.found(TEXT[:end]) == end
    resumed = ends if page_format == "fp16" else (256, 590, 600)
    for length in (44, 45, 255, 256, 299, 300, 510, 511, 589, 590, 700):
        known = max([0, *(end for end in resumed if end <= length)])
        assert hybrid.found(TEXT[:length]) == known


def test_a_state_that_is_found_stays_longer_than_one_that_is_not() -> None:
    hybrid = Hybrid()
    hybrid.prefixes.snapshots.max_bytes = 3 * State(0).nbytes
    prompts = [[first, *TEXT[:20]] for first in range(5)]
    for prompt in prompts[:3]:
        hybrid.insert(prompt, hybrid.sequence(prompt))
    assert hybrid.found(prompts[0]) == 21
    for prompt in prompts[3:]:
        hybrid.insert(prompt, hybrid.sequence(prompt))
    assert [hybrid.found(prompt) for prompt in prompts] == [21, 0, 0, 21, 21]


def test_states_never_take_more_than_their_share_and_pinned_ones_stay() -> None:
    prompts = Prompts(10)
    prompts.keep((0,), nbytes=4)
    prompts.index.pin("", "", (0,))
    for number, nbytes in enumerate((6, 3, 3, 5, 1, 6), 1):
        prompts.keep((number,), nbytes=nbytes)
        assert prompts.snapshots.nbytes <= 10
    assert set(prompts.uses) == {(0,), (6,)}
    path = prompts.index.insert("", (7,), [{}])
    assert not prompts.snapshots.keep(path, 1, "too much", 7, is_answer=False)
    assert set(prompts.uses) == {(0,), (6,)}
    prompts.index.holds.unpin("", (0,))
    prompts.index.forget()
    del path
    assert prompts.snapshots.nbytes == 0


def test_a_state_in_a_node_that_has_gone_breaks_nothing() -> None:
    """Somebody may hold the node still, and a sibling its state."""
    prompts = Prompts(2)
    prompts.keep((1, 2))
    prompts.keep((1, 2, 3))
    prompts.keep((1, 2, 4))
    gone = prompts.index.known("", (1, 2, 3)).nodes
    prompts.index.forget(lambda: len(prompts.index) == 1)
    assert gone[0] not in prompts.index.nodes()
    for number in range(5, 9):
        prompts.keep((number,))
        assert prompts.snapshots.nbytes <= 2
    assert len(gone) == 1


class Prompts:
    """Prompts in an index of pages of four tokens, with states of their own."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.index = PrefixIndex(4)
        self.snapshots = Snapshots(most)

    def keep(self, tokens: abc.Sequence[int], *, is_answer: bool = False, nbytes: int = 1) -> None:
        """Insert tokens with the state behind them."""
        path = self.index.insert("", tokens, [{}] * -(-len(tokens) // 4))
        end = len(tokens) - 4 * (len(path) - 1)
        assert self.snapshots.keep(path, end, tuple(tokens), nbytes, is_answer=is_answer)

    def found(self, tokens: abc.Sequence[int]) -> tuple[int, ...]:
        """The tokens before the longest state that a prompt can resume from."""
        match = self.index.match("", [*tokens, -1])
        states = [
            each
            for at, node in enumerate(match.nodes)
            for end, each in live_snapshots(node)
            if 4 * at + end <= match.num_tokens
        ]
        if states:
            self.snapshots.touch(states[-1])
        return states[-1].states if states else ()

    @property
    def uses(self) -> dict[tuple[int, ...], Use]:
        """What the order knows of each state, by the tokens before it."""
        order = self.snapshots._order
        return {each.states: order.use_of(weakref.ref(each)) for each in self.snapshots._live()}


def test_states_on_the_way_go_first_then_what_is_worth_least() -> None:
    prompts = Prompts(4)
    system = [*range(8)]
    prompts.keep(system)
    prompts.keep([*system, *[1] * 4])
    prompts.keep([*system, *[1] * 9])  # the conversation goes on
    prompts.keep([*system, *[2] * 4])  # and another one begins
    assert prompts.found([*system, *[1] * 20]) == (*system, *[1] * 9)
    prompts.keep([*[3] * 9])
    # Nobody had parted from the conversation at its first turn, though that was not used last.
    assert set(prompts.uses) == {
        tuple(system),
        (*system, *[1] * 9),
        (*system, *[2] * 4),
        (*[3] * 9,),
    }
    assert prompts.found([*system, *[1] * 4, 7]) == tuple(system)


def test_a_conversation_takes_its_uses_along() -> None:
    prompts = Prompts()
    text: tuple[int, ...] = (1,) * 5
    prompts.keep(text)
    for turn in range(2, 6):
        prompts.keep((9, turn))
        assert prompts.found((*text, 0)) == text
        text += (turn,) * 5
        prompts.keep(text)
    assert prompts.uses[text].times == 1
    assert prompts.uses[text].recent > 1.5
    prompts.keep((*text[:-5], 8, 8))  # parts from it: another conversation
    assert prompts.uses[(*text[:-5], 8, 8)].recent == 1


def common(some: abc.Sequence[int], others: abc.Sequence[int]) -> int:
    return next(
        (at for at, (one, two) in enumerate(zip(some, others, strict=False)) if one != two),
        min(len(some), len(others)),
    )


lists = st.lists(st.integers(0, 1), min_size=1, max_size=11)


@example([([0], False), ([0, 0], False), ([0, 0, 1], False), ([0, 0, 0], False)])
@given(st.lists(st.tuples(lists, st.booleans()), min_size=1, max_size=10))
@examples(80)
@pytest.mark.slow
def test_what_a_state_is_for_is_what_its_prompts_say(
    kept: list[tuple[list[int], bool]],
) -> None:
    """Whatever parts within a page."""
    prompts = Prompts()
    answers: dict[tuple[int, ...], bool] = {}
    for tokens, is_answer in kept:
        prompts.keep(tokens, is_answer=is_answer)
        answers[tuple(tokens)] = answers.get(tuple(tokens), True) and is_answer
    for _ in range(2):  # what a state is for is found when a path of it is inserted
        for tokens, is_answer in kept:
            prompts.keep(tokens, is_answer=is_answer)
    assert set(prompts.uses) == set(answers)
    for prompt, use in prompts.uses.items():
        before = [len(each) for each in answers if common(each, prompt) == len(each) < len(prompt)]
        assert (use.position, use.tokens) == (len(prompt), len(prompt) - max(before, default=0))
        assert use.is_superseded == any(
            not is_answer
            and common(later, prompt) == len(prompt) < len(later)
            and not any(
                len(prompt) <= common(each, later) < min(len(each), len(later)) for each in answers
            )
            for later, is_answer in answers.items()
        )
    for asked in product((0, 1), repeat=6):
        states = [each for each in answers if common(each, asked) == len(each)]
        assert prompts.found(asked) == max(states, key=len, default=())


def test_prompts_tell_where_they_part_from_others() -> None:
    hybrid = Hybrid()
    prompt = TEXT[:900]
    assert hybrid.prefixes.parting("", prompt) == 0
    hybrid.insert(prompt, hybrid.sequence(prompt))
    assert hybrid.prefixes.parting("", prompt) == 768  # no state is within reach
    assert hybrid.prefixes.parting("", [*prompt, 1]) == 0
    other = [*prompt[:600], -1, -1]
    assert hybrid.prefixes.parting("", other) == 512
    hybrid.insert(prompt[:300], hybrid.sequence(prompt[:300]))
    assert hybrid.prefixes.parting("", other) == 0
    hybrid.insert(prompt[:256], hybrid.sequence(prompt[:256]))
    assert hybrid.prefixes.parting("", [*prompt[:500], -1]) == 0
    without = PrefixCache(PagePool(1, max_bytes=1 << 22), has_states=False)
    assert without.parting("", prompt) == 0


def test_a_state_takes_the_place_of_a_longer_one_that_was_evicted() -> None:
    prompts = Prompts(3)
    prompts.keep((1,) * 4)
    prompts.keep((1,) * 8)
    (longer,) = [each for each in prompts.snapshots._live() if len(each.states) == 8]
    longer.states = None
    prompts.snapshots._order.discard(weakref.ref(longer))
    prompts.keep((2, 2))
    prompts.keep((3, 3))
    assert prompts.found((1,) * 8) == (1,) * 4
    # It is the last of its conversation now.
    prompts.keep((4, 4))
    assert set(prompts.uses) == {(1,) * 4, (3, 3), (4, 4)}
