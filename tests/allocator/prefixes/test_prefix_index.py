"""The prefix index: its matches, its references and its evictions."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.prefixes.prefix_node import Match
from tests.support.examples import examples
from tests.support.reserving import reserve

PAGE = 4


class Indexed:
    """An index and an allocator whose tables are inserted and dropped."""

    def __init__(self, blocks: int = 1000) -> None:
        self.allocator = BlockAllocator(ByteBudget(blocks), 1, PAGE)
        self.index = PrefixIndex(PAGE)

    def insert(self, tokens: Sequence[int], namespace: str = "") -> tuple[int, ...]:
        """The blocks of a table that held these tokens and was dropped."""
        table = self.allocator.new_table()
        reserve(table, 0, len(tokens))
        blocks = table.blocks
        self.index.insert(namespace, tokens, [{self.allocator: block} for block in blocks])
        self.allocator.drop(table)
        return blocks

    def blocks_of(self, match: Match) -> list[int]:
        return [node.blocks[self.allocator] for node in match.nodes]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@examples(100)
@given(
    inserted=st.lists(st.lists(st.integers(-1, 1), max_size=14), max_size=8),
    prompt=st.lists(st.integers(-1, 1), max_size=14),
)
def test_what_is_found_is_the_longest_common_prefix(
    inserted: list[list[int]], prompt: list[int]
) -> None:
    indexed = Indexed()
    for tokens in inserted:
        indexed.insert(tokens)
    match = indexed.index.match("", prompt)
    best = max((common(tokens, prompt[:-1]) for tokens in inserted), default=0)
    assert match.num_tokens == best
    spelled = [token for node in match.nodes for token in node.tokens]
    assert spelled[:best] == prompt[:best]
    indexed.allocator.check()


def test_tokens_of_equal_hash_are_not_taken_for_each_other() -> None:
    """In Python -1 and -2 have the same hash, and so have tuples of them."""
    indexed = Indexed()
    assert hash((-1,) * PAGE) == hash((-2,) * PAGE)
    indexed.insert([-1] * PAGE)
    assert indexed.index.match("", [-2] * (PAGE + 1)).num_tokens == 0
    extremes = [-(2**63), 2**63 - 1, -1, 0, -1, 2**40]
    indexed.insert(extremes)
    assert indexed.index.match("", [*extremes, 1]).num_tokens == 6


def test_nothing_stays_of_a_namespace_without_prompts() -> None:
    """Each salt and each change of weights has one."""

    class Salt(str):
        """A name that can be referred to weakly."""

    indexed = Indexed()
    for salt in map(Salt, "abc"):
        indexed.insert([1, 2, 3], namespace=salt)
        indexed.insert([1, 2, 3, 4, 5], namespace=salt)  # Takes the place of its first node.
        indexed.insert([], namespace=Salt("empty"))
        assert indexed.index.match(salt, [1, 2, 3, 4, 5, 6]).num_tokens == 5
    last = weakref.ref(salt)
    del salt
    indexed.index.forget()
    gc.collect()
    assert last() is None
    indexed.allocator.check()


def test_namespaces_share_nothing() -> None:
    indexed = Indexed()
    indexed.insert([1, 2, 3, 4, 5], namespace="alice")
    assert indexed.index.match("bob", [1, 2, 3, 4, 5, 6]).num_tokens == 0
    assert indexed.index.match("alice", [1, 2, 3, 4, 5, 6]).num_tokens == 5


def test_blocks_are_cached_until_evicted_and_the_least_recently_used_goes_first() -> None:
    indexed = Indexed()
    for first in (1, 2, 3):
        indexed.insert([first] * 8)
    stats = indexed.allocator.stats()
    assert (stats.blocks_used, stats.blocks_cached) == (0, 6)
    indexed.index.match("", [1] * 9)
    assert indexed.index.evict(iter([False, False, False, True]).__next__) == 3
    found = {first: indexed.index.match("", [first] * 9).num_tokens for first in (1, 2, 3)}
    assert found == {1: 8, 2: 0, 3: 4}
    indexed.allocator.check()


def test_blocks_in_use_and_pinned_ones_are_never_evicted() -> None:
    indexed = Indexed()
    table = indexed.allocator.new_table()
    reserve(table, 0, 8)
    blocks = [{indexed.allocator: block} for block in table.blocks]
    indexed.index.insert("", [1] * 8, blocks)
    indexed.insert([2] * 8)
    indexed.insert([3] * 8)
    assert indexed.index.pin("", "", [2] * 8) == 8
    assert len(indexed.index.evictable(indexed.allocator)) == 2
    assert indexed.index.evict(lambda: False) == 2
    assert [indexed.index.match("", [n] * 9).num_tokens for n in (1, 2, 3)] == [8, 8, 0]
    assert indexed.index.forget() == 2
    assert [indexed.index.match("", [n] * 9).num_tokens for n in (1, 2)] == [0, 8]
    indexed.index.holds.unpin("", [2] * 8)
    indexed.allocator.drop(table)
    assert indexed.index.forget() == 2
    assert indexed.allocator.stats().blocks_cached == 0
    indexed.allocator.check()


def test_a_block_is_found_in_every_namespace_that_it_was_inserted_into() -> None:
    indexed = Indexed()
    indexed.insert([1] * 4, "old")
    (block,) = indexed.blocks_of(indexed.index.match("old", [1] * 5))
    table = indexed.allocator.new_table()
    reserve(table, 0, 8)
    blocks = [{indexed.allocator: each} for each in (block, table.blocks[1])]
    indexed.index.insert("new", [1] * 8, blocks)
    assert indexed.blocks_of(indexed.index.match("new", [1] * 9)) == [block, table.blocks[1]]
    indexed.allocator.drop(table)
    indexed.allocator.check()
    # The block counts once, and stays until its last node is gone.
    assert (len(indexed.index), indexed.allocator.stats().blocks_cached) == (3, 2)
    indexed.index.pin("", "new", [1] * 4)
    assert len(indexed.index.evictable(indexed.allocator)) == 1
    # Evicting the old node would free nothing.
    assert indexed.index.evict(lambda: False) == 1
    assert indexed.index.match("old", [1] * 5).num_tokens == 4
    indexed.index.holds.unpin("", [1] * 4)
    assert indexed.index.evict(lambda: len(indexed.index) == 1) == 1
    assert indexed.allocator.stats().blocks_cached == 1
    assert indexed.index.forget() == 1
    assert indexed.allocator.stats().blocks_cached == 0
    indexed.allocator.check()


@dataclass
class State:
    """A checkpoint, which is opaque to the index."""

    pins: int = 0


def test_checkpoints_are_pinned_by_the_nodes_that_hold_them() -> None:
    indexed = Indexed()
    table = indexed.allocator.new_table()
    reserve(table, 0, 3)
    blocks = [{indexed.allocator: table.blocks[0]}]
    first, longer, again = State(), State(), State()
    (node,) = indexed.index.insert("", [1, 2], blocks)
    node.hold_checkpoint(2, first)
    indexed.index.pin("", "", [1, 2])
    # The shorter node stays because it is pinned, and the longer one holds its checkpoint too.
    (node,) = indexed.index.insert("", [1, 2, 3], blocks)
    node.hold_checkpoint(3, longer)
    indexed.index.pin("", "", [1, 2, 3])
    assert (first.pins, longer.pins) == (2, 1)
    (node,) = indexed.index.insert("", [1, 2, 3], blocks)
    node.hold_checkpoint(3, again)
    assert (longer.pins, again.pins) == (0, 1)
    indexed.index.holds.unpin("", [1, 2])
    indexed.index.holds.unpin("", [1, 2, 3])
    assert (first.pins, longer.pins, again.pins) == (0, 0, 0)


def test_what_is_in_use_is_forgotten_last_and_stays_with_who_uses_it() -> None:
    indexed = Indexed(blocks=100)
    indexed.insert([1] * 8)
    again = indexed.allocator.new_table()
    reserve(again, 0, 12)
    # The leaf of a path that another prompt began.
    blocks = [{indexed.allocator: block} for block in again.blocks]
    indexed.index.insert("", [1] * 8 + [2] * 4, blocks)
    assert indexed.index.num_prompts == 1
    assert len(indexed.index.nodes()) == 3
    assert indexed.index.evict(lambda: False) == 0
    assert indexed.index.forget(lambda: len(indexed.index) == 1) == 2
    assert indexed.index.forget(lambda: False) == 1
    assert (indexed.index.num_prompts, indexed.index.nodes()) == (0, [])
    assert indexed.allocator.stats().blocks_used == 3
    indexed.allocator.check()


def test_a_block_that_is_moved_is_found_in_every_namespace() -> None:
    indexed = Indexed()
    allocator = indexed.allocator
    table = allocator.new_table()
    reserve(table, 0, 4)
    (block,) = table.blocks
    for namespace in ("alice", "bob"):
        indexed.index.insert(namespace, [1, 2, 3, 4], [{allocator: block}])
    allocator.ensure_free({"fp16": 1})
    target = allocator.formats[0].free[0]
    allocator.apply_moves({block: target})
    for namespace in ("alice", "bob"):
        assert indexed.blocks_of(indexed.index.match(namespace, [1, 2, 3, 4, 5])) == [target]
    allocator.drop(table)
    indexed.index.forget()
    allocator.check()


def test_pruning_leaves_what_is_needed_pinned_or_before_those() -> None:
    index = PrefixIndex(4)
    prompts = [[first, *range(1, 10)] for first in range(3)]
    for prompt in prompts:
        index.insert("", prompt, [{}, {}, {}])
    index.insert("", [*prompts[0][:8], 99], [{}, {}, {}])
    index.pin("", "", prompts[2])
    index.prune(lambda node: node.tokens == (99,))
    assert len(index) == 3 + 3
    assert [index.peek("", [*prompt, 0]).num_tokens for prompt in prompts] == [8, 0, 10]
    index.holds.unpin("", prompts[2])
    index.prune(lambda node: False)
    assert (len(index), index.num_prompts) == (0, 0)


def test_a_prompt_that_comes_back_is_worth_what_it_was_before_it_was_evicted() -> None:
    indexed = Indexed()
    often, once = [1, 1], [2, 2]
    indexed.insert(often)
    for _ in range(3):
        indexed.index.match("", [*often, 0])
    indexed.index.evict(lambda: False)
    for tokens in (often, once):
        indexed.insert(tokens)
    uses = {node.tokens[0]: node.use for node in indexed.index.nodes()}
    assert uses[1].times == uses[2].times == 1
    assert uses[1].recent > 2 * uses[2].recent
