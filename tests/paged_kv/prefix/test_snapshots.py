"""Snapshots of recurrent layers: the positions where they hit, and the order of eviction."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagePool, Sequence
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.prefix.snapshots import Snapshots
from paged_kv.steps.batch import Batch

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


def test_the_longest_state_that_a_prompt_goes_along_with_is_taken() -> None:
    """Also of several states in one block, and after a longer block has replaced theirs."""
    hybrid = Hybrid()
    ends = (10, 40, 200, 256, 300, 511)
    for end in ends:
        hybrid.insert(TEXT[:end], hybrid.sequence(TEXT[:end]))
    for length in (9, 10, 39, 40, 255, 256, 257, 300, 510, 511, 900):
        assert hybrid.found(TEXT[:length]) == max([0, *(end for end in ends if end <= length)])


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
    snapshots = Snapshots(10)
    pinned = snapshots.take("pinned", 4)
    assert pinned is not None
    pinned.pins = 1
    held = [pinned]
    for nbytes in (6, 3, 3, 5, 1, 6):
        taken = snapshots.take(nbytes, nbytes)
        assert taken is not None
        held.append(taken)
        assert snapshots.nbytes <= 10
    assert [each.states for each in held] == ["pinned", *[None] * 5, 6]
    assert snapshots.take("too much", 7) is None
    assert (pinned.states, held[-1].states) == ("pinned", 6)
    del held, taken
    assert snapshots.nbytes == 4
