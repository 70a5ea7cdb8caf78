"""Random histories of a prefix index with several namespaces, pins, moves and evictions: its
matches are what the pages hold, its counts are right, and without pins everything can be
evicted."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paged_kv.allocator.block_allocator import BlockAllocator, BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import NotPinned
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.slabs import Rewrite, block_range, slab_of
from tests.support.examples import examples
from tests.support.reserving import reserve

PAGE, MAX_TABLES, BLOCKS = 4, 4, 48
FREED = -2

namespaces = st.sampled_from(["", "alice"])
# Few tokens, so that prompts often share a prefix that ends anywhere in a block.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=11)
picks = st.integers(0, MAX_TABLES - 1)


@dataclass(eq=False)
class State:
    """A checkpoint: the state after these tokens."""

    tokens: tuple[int, ...]
    pins: int = 0


class PrefixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[int, list[int]] = {}
        callbacks = self.map_slab, self.unmap_slab, self.rewrite_slabs
        self.allocator = BlockAllocator(ByteBudget(BLOCKS), 1, PAGE, *callbacks)
        self.index = PrefixIndex(PAGE)
        self.pinned: list[tuple[str, tuple[int, ...], int]] = []
        self.tables: dict[BlockTable, list[int]] = {}

    def map_slab(self, slab: int, pages: int, _: str) -> None:
        self.pages.update({block: [FREED] * PAGE for block in block_range(slab, pages)})

    def unmap_slab(self, slab: int) -> None:
        for block in [block for block in self.pages if slab_of(block) == slab]:
            del self.pages[block]

    def rewrite_slabs(self, rewrite: Rewrite, slab: int, moves: Mapping[int, int]) -> bool:
        self.map_slab(slab, rewrite.new_pages, "")
        self.pages.update({to: list(self.pages[block]) for block, to in moves.items()})
        for each in rewrite.emptied:
            self.unmap_slab(each)
        return True

    def table(self, pick: int) -> BlockTable | None:
        return list(self.tables)[pick % len(self.tables)] if self.tables else None

    def write(self, table: BlockTable, tokens: list[int]) -> None:
        """Append tokens to a table, in blocks that no other table has."""
        start, end = len(self.tables[table]), len(self.tables[table]) + len(tokens)
        for source, target in reserve(table, start, end).items():
            self.pages[target] = list(self.pages[source])
        for position, token in enumerate(tokens, start):
            self.pages[table.blocks[position // PAGE]][position % PAGE] = token
        self.tables[table] += tokens

    def make_room(self, tokens: int) -> bool:
        """Make room for so many blocks, and one for a copy; returns False if others hold them."""
        needed = -(-tokens // PAGE) + 1
        self.index.evict(lambda: self.allocator.available() >= needed)
        return self.allocator.available() >= needed

    @rule(namespace=namespaces, prompt=prompts)
    def fetch_and_go_on(self, namespace: str, prompt: list[int]) -> None:
        if len(self.tables) == MAX_TABLES or not self.make_room(len(prompt)):
            return
        match = self.index.match(namespace, prompt)
        table = self.allocator.new_table()
        blocks = [node.blocks[self.allocator] for node in match.nodes]
        self.allocator.refs.retain(blocks)
        table.change(tuple(blocks), match.num_tokens)
        self.tables[table] = prompt[: match.num_tokens]
        self.write(table, prompt[match.num_tokens :])

    @rule(pick=picks, more=prompts)
    def go_on(self, pick: int, more: list[int]) -> None:
        table = self.table(pick)
        if table is not None and self.make_room(len(more)):
            self.write(table, more)

    @rule(pick=picks, namespace=namespaces, left_out=st.integers(0, 3), has_state=st.booleans())
    def insert(self, pick: int, namespace: str, left_out: int, has_state: bool) -> None:
        """Insert under any salt, also another one, all tokens of a sequence or its first ones, with
        a state after them or without."""
        table = self.table(pick)
        if table is None:
            return
        tokens = self.tables[table][: len(self.tables[table]) - left_out]
        blocks = [{self.allocator: block} for block in table.blocks[: -(-len(tokens) // PAGE)]]
        nodes = self.index.insert(namespace, tokens, blocks)
        if nodes and has_state:
            nodes[-1].hold_checkpoint((len(tokens) - 1) % PAGE + 1, State(tuple(tokens)))
        assert self.index.match(namespace, [*tokens, -1]).num_tokens == len(tokens)

    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        table = self.table(pick)
        if table is not None:
            del self.tables[table]
            self.allocator.drop(table)

    @rule(pick=picks, namespace=namespaces, end=st.integers(1, 11), more=prompts)
    def pin_what_may_be_known(self, pick: int, namespace: str, end: int, more: list[int]) -> None:
        table = self.table(pick)
        if table is not None:
            self.pin(namespace, self.tables[table][:end] + more)

    @rule(pick=picks)
    def pin_again(self, pick: int) -> None:
        if self.pinned:
            namespace, prompt, _ = self.pinned[pick % len(self.pinned)]
            self.pin(namespace, list(prompt))

    def pin(self, namespace: str, prompt: list[int]) -> None:
        known = self.index.match(namespace, [*prompt, -1]).num_tokens
        assert self.index.pin(namespace, namespace, prompt) == known
        self.pinned.append((namespace, tuple(prompt), known))

    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        if self.pinned:
            namespace, prompt, _ = self.pinned[pick % len(self.pinned)]
            latest = [each for each in self.pinned if each[:2] == (namespace, prompt)][-1]
            self.pinned.remove(latest)
            assert self.index.holds.unpin(namespace, prompt) == latest[2]

    @rule(namespace=namespaces, prompt=prompts)
    def unpin_what_is_not_pinned(self, namespace: str, prompt: list[int]) -> None:
        if (namespace, tuple(prompt)) not in [each[:2] for each in self.pinned]:
            with pytest.raises(NotPinned):
                self.index.holds.unpin(namespace, prompt)

    @rule(most=st.integers(0, 20), in_use_too=st.booleans())
    def evict(self, most: int, in_use_too: bool) -> None:
        evictable = set(self.index.evictable(self.allocator))
        let_go = self.index.forget if in_use_too else self.index.evict
        let_go(lambda: len(self.index) <= most)
        still = set(self.index.evictable(self.allocator))
        assert still <= evictable
        assert not (in_use_too and most == 0 and still)

    @rule()
    def move_pages(self) -> None:
        self.allocator.compact()

    @invariant()
    def every_node_holds_its_tokens(self) -> None:
        for node in self.index.nodes():
            held = self.pages[node.blocks[self.allocator]]
            assert held[: len(node.tokens)] == list(node.tokens)
        for table, tokens in self.tables.items():
            held = [token for block in table.blocks for token in self.pages[block]]
            assert held[: len(tokens)] == tokens

    @invariant()
    def every_state_is_that_after_its_tokens(self) -> None:
        tokens_of: dict[Any, tuple[int, ...]] = {}
        # A pinned node stays when one with more tokens takes over its states.
        pins: Counter[State] = Counter()
        for node in self.index.nodes():
            before = tokens_of.get(node.parent, ())
            tokens_of[node] = (*before, *node.tokens)
            for end, state in node.checkpoints.items():
                assert isinstance(state, State)
                assert state.tokens == (*before, *node.tokens[:end])
                pins[state] += node.pins
        assert all(state.pins == count for state, count in pins.items())

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        for namespace, prompt, known in self.pinned:
            assert self.index.match(namespace, [*prompt, -1]).num_tokens >= known

    @invariant()
    def pins_are_those_that_were_not_undone(self) -> None:
        pinned = chain.from_iterable(self.index.holds._pins.values())
        expected = Counter(node for match in pinned for node in match.nodes)
        assert {node: node.pins for node in self.index.nodes() if node.pins} == expected

    @invariant()
    def the_invariants_hold(self) -> None:
        allocator = self.allocator
        allocator.check()
        holders: dict[int, list[Any]] = {}
        for node in self.index.nodes():
            holders.setdefault(node.blocks[allocator], []).append(node)
        assert holders.keys() == allocator.refs.kept.keys()
        cached = {block for block in holders if allocator.ref_count(block) == 1}
        assert allocator.stats().blocks_cached == len(cached)
        pinned = {block for block in holders if any(node.pins for node in holders[block])}
        assert set(self.index.evictable(allocator)) == cached - pinned

    @invariant()
    def what_is_free_is_overwritten(self) -> None:
        for block in self.pages:
            if not self.allocator.ref_count(block):
                self.pages[block] = [FREED] * PAGE

    def teardown(self) -> None:
        for namespace, prompt, _ in self.pinned:
            self.index.holds.unpin(namespace, prompt)
        for table in self.tables:
            self.allocator.drop(table)
        assert len(self.index.evictable(self.allocator)) == len(self.allocator.refs.kept)
        self.index.evict(lambda: False)
        assert (len(self.index), self.allocator.stats().blocks_used) == (0, 0)
        assert not self.allocator.refs.counts


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = examples(50, stateful_step_count=40)
