"""Random histories of an allocator against an oracle that shares nothing and moves nothing.

Pages are lists of slots, in memory that lives as long as its slab. So a missing copy, a page moved
without its tables, or a page used after its slab was unmapped shows as wrong content.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import count
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paged_kv.allocator.block_allocator import BlockAllocator, BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import BlockStateError, PoolExhausted
from paged_kv.allocator.slabs import Rewrite, block_range, joining, slab_of
from paged_kv.allocator.writes import Write, blocks_needed
from tests.support.examples import examples
from tests.support.invariants import assert_invariants, live_rows, used_rows
from tests.support.reserving import reserve

PAGE_SIZE, BUDGET_BYTES, MAX_TABLES, MAX_SLABS = 4, 320, 6, 5
BLOCK_BYTES = {"large": 8, "medium": 5, "small": 3}
# The format of a table's first full block where the others have these.
FIRST = {"large": "large", "medium": "medium", "small": "medium"}
NEVER_WRITTEN, FREED = -1, -2

picks = st.integers(0, MAX_TABLES - 1)
formats = st.sampled_from(list(BLOCK_BYTES))
rarely = st.sampled_from([False] * 9 + [True])


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[int, list[int]] = {}
        self.contents: dict[BlockTable, list[int]] = {}
        self.values = count()
        self.collected_by_map: list[BlockTable] = []
        self.next_slab_fails = self.pages_stay = False
        self.block_bytes = dict(BLOCK_BYTES)
        self.slab_format: dict[int, str] = {}
        budget = ByteBudget(BUDGET_BYTES)
        self.allocator = BlockAllocator(
            budget,
            BLOCK_BYTES["large"],
            PAGE_SIZE,
            self.map_slab,
            self.unmap_slab,
            self.rewrite_slabs,
            MAX_SLABS,
            "large",
        )
        for name, size in BLOCK_BYTES.items():
            self.allocator.add_format(name, size)

        # The oldest table is never dropped, so other tables can share its blocks.
        self.new_table()
        self.append(0, 30, slab_fails=False)

    def map_slab(self, slab: int, pages: int, page_format: str) -> None:
        while self.collected_by_map:
            self.allocator.drop_later(self.collected_by_map.pop())
        if self.next_slab_fails:
            raise MemoryError("planted")
        self.slab_format[slab] = page_format
        for block in block_range(slab, pages):
            assert block not in self.pages, "a slab is mapped twice"
            self.pages[block] = [NEVER_WRITTEN] * PAGE_SIZE

    def unmap_slab(self, slab: int) -> None:
        for block in [block for block in self.pages if slab_of(block) == slab]:
            del self.pages[block]
        self.slab_format.pop(slab, None)

    def rewrite_slabs(self, rewrite: Rewrite, slab: int, moves: Mapping[int, int]) -> bool:
        if self.pages_stay:
            return False
        emptied = rewrite.emptied
        used = self.used_blocks()
        assert moves.keys() == {block for block in used if slab_of(block) in emptied}
        if rewrite.new_pages:
            self.map_slab(slab, rewrite.new_pages, rewrite.slabs.name)
        assert self.bytes_of(self.block_bytes) <= self.allocator.budget.mapped <= BUDGET_BYTES
        assert used.isdisjoint(moves.values())
        assert set(emptied).isdisjoint(map(slab_of, moves.values()))
        assert all(self.format_of(a) == self.format_of(b) for a, b in moves.items())
        self.copy_pages(moves)
        for each in emptied:
            self.unmap_slab(each)
        return True

    def table(self, pick: int) -> BlockTable:
        return list(self.contents)[pick % len(self.contents)]

    def used_blocks(self) -> set[int]:
        return {block for table in self.allocator.tables for block in table.blocks}

    def copy_pages(self, copies: Mapping[int, int]) -> None:
        for source, target in copies.items():
            self.pages[target] = list(self.pages[source])

    def format_of(self, block: int) -> str:
        return self.slab_format[slab_of(block)]

    def free_blocks(self, page_format: str) -> list[int]:
        free = self.pages.keys() - self.used_blocks()
        return sorted(block for block in free if self.format_of(block) == page_format)

    @rule(page_format=formats)
    def new_table(self, page_format: str = "large") -> None:
        if len(self.contents) < MAX_TABLES:
            table = self.allocator.new_table(None, page_format, FIRST[page_format])
            self.contents[table] = []

    @rule(pick=picks, page_format=formats)
    def full_blocks_get_another_format(self, pick: int, page_format: str) -> None:
        table = self.table(pick)
        table.page_format, table.first_format = page_format, FIRST[page_format]

    @rule(names=st.lists(formats, max_size=8))
    def load(self, names: list[str]) -> None:
        """Give a table blocks of several formats, and then their contents."""
        if len(self.contents) == MAX_TABLES:
            return
        table = self.allocator.new_table()
        try:
            table.append(names)
        except PoolExhausted:
            assert table.blocks == ()
            names = []
        assert [self.format_of(block) for block in table.blocks] == names
        self.contents[table] = []
        self.write_rows(table, 0, len(names) * PAGE_SIZE)

    @rule(page_format=st.sampled_from(["medium", "small"]), number=st.integers(1, 6))
    def requantise(self, page_format: str, number: int) -> None:
        """Move blocks into free ones of another format, for all tables that hold them. They never
        move back into the format that is written."""
        self.allocator.drain()
        used = sorted(self.used_blocks())
        sources = [block for block in used if self.format_of(block) != page_format][:number]
        self.move(sources, page_format)

    @rule(pick=picks)
    def recode_full_blocks(self, pick: int) -> None:
        table = self.table(pick)
        self.allocator.drain()
        tokens = len(self.contents[table])
        full = table.blocks[: tokens // PAGE_SIZE]
        if table.page_format == "large":
            assert table.unrecoded(tokens) == {}
            return
        expected: dict[str, list[int]] = {}
        for page, block in enumerate(full):
            if self.format_of(block) == "large":
                name = table.page_format if page else FIRST[table.page_format]
                expected.setdefault(name, []).append(block)
        assert table.unrecoded(tokens) == expected
        for name in table.full_formats:
            self.move(table.unrecoded(tokens).get(name, []), name)

    def move(self, sources: list[int], page_format: str) -> None:
        """Move as many of these blocks as there is room for."""
        sources = sources[: self.allocator.available(page_format)]
        holders = [(self.holder(block), block) for block in sources]
        places = [(table, table.blocks.index(block)) for table, block in holders]
        self.allocator.ensure_free({page_format: len(sources)})
        # Mapping a slab may have moved some.
        sources = [table.blocks[entry] for table, entry in places]
        moves = dict(zip(sources, self.free_blocks(page_format), strict=False))
        assert len(moves) == len(sources)
        counts = {block: self.allocator.ref_count(block) for block in sources}
        self.copy_pages(moves)
        self.allocator.apply_moves(moves)
        assert all(
            self.allocator.ref_count(moves[block]) == count for block, count in counts.items()
        )

    def holder(self, block: int) -> BlockTable:
        return next(table for table in self.allocator.tables if block in table.blocks)

    @rule(page_format=formats, size=st.integers(1, 10))
    def blocks_turn_out_to_be_of_another_size(self, page_format: str, size: int) -> None:
        before = self.allocator.budget.mapped
        grown = {**self.block_bytes, page_format: size}
        try:
            self.allocator.set_block_bytes({page_format: size})
        except PoolExhausted:
            assert self.bytes_of(grown) > BUDGET_BYTES
            assert self.allocator.budget.mapped == before
            return
        self.block_bytes = grown
        self.allocator.format_named(page_format).page_bytes = size

    def bytes_of(self, block_bytes: dict[str, int]) -> int:
        return sum(block_bytes[self.format_of(block)] for block in self.pages)

    @rule(pick=picks, tokens=st.integers(1, 20), slab_fails=rarely)
    def append(self, pick: int, tokens: int, slab_fails: bool) -> None:
        table = self.table(pick)
        self.write(table, len(self.contents[table]), tokens, slab_fails)

    @rule(
        some=st.lists(picks, min_size=1),
        back=st.integers(0, 20),
        tokens=st.integers(1, 20),
        copy_fails=rarely,
    )
    def write_over(self, some: list[int], back: int, tokens: int, copy_fails: bool) -> None:
        for table in dict.fromkeys(map(self.table, some)):
            start = max(0, len(self.contents[table]) - back)
            self.write(table, start, tokens, copy_fails=copy_fails)

    def write(
        self,
        table: BlockTable,
        start: int,
        tokens: int,
        slab_fails: bool = False,
        copy_fails: bool = False,
    ) -> None:
        def copy_pages(copies: Mapping[int, int]) -> None:
            assert table.blocks == before, "the table refers to pages that are not copied"
            if copy_fails:
                raise MemoryError
            self.copy_pages(copies)

        self.allocator.drain()
        before = table.blocks
        self.next_slab_fails = slab_fails
        try:
            reserve(table, start, start + tokens, copy_pages)
        except (PoolExhausted, MemoryError) as error:
            assert table.blocks == before
            self.expect_no_room(error, Write(table, start, start + tokens))
            return
        finally:
            self.next_slab_fails = False
        first, last = start // PAGE_SIZE, (start + tokens - 1) // PAGE_SIZE
        for page in range(first, last + 1):
            is_left = page < last and page * PAGE_SIZE >= start
            full = table.page_format if page else FIRST[table.page_format]
            assert self.format_of(table.blocks[page]) == (full if is_left else "large")
        self.write_rows(table, start, tokens)

    def expect_no_room(self, error: Exception, write: Write) -> None:
        if isinstance(error, PoolExhausted):
            needs = blocks_needed([write])
            # The error names the first of the needed formats that has no room.
            assert error.free < error.needed
            assert error.needed in needs.values()
            if len(needs) == 1:
                (name,) = needs
                assert self.allocator.available(name) == error.free

    def write_rows(self, table: BlockTable, start: int, tokens: int) -> None:
        values = [next(self.values) for _ in range(tokens)]
        for position, value in enumerate(values, start):
            block = table.blocks[position // PAGE_SIZE]
            assert self.allocator.ref_count(block) == 1, "a shared block is written"
            self.pages[block][position % PAGE_SIZE] = value
        self.contents[table][start : start + tokens] = values

    @rule(some=st.lists(picks, min_size=1))
    def fork(self, some: list[int]) -> None:
        for table in map(self.table, some):
            if len(self.contents) < MAX_TABLES:
                self.contents[self.allocator.fork(table)] = list(self.contents[table])

    @rule(pick=picks, tokens=st.integers(0, 14))
    def trim(self, pick: int, tokens: int) -> None:
        table = self.table(pick)
        keep = max(0, len(self.contents[table]) - tokens)
        table.truncate(keep)
        del self.contents[table][keep:]

    @rule(pick=picks, when=st.sampled_from(["now", "next call", "next slab"]))
    def drop(self, pick: int, when: str) -> None:
        """The next call drops it: a finaliser works like this, and may also run while a slab is
        mapped."""
        table = self.table(pick)
        if table is self.table(0):
            return
        del self.contents[table]
        if when == "now":
            self.allocator.drop(table)
        elif when == "next call":
            self.allocator.drop_later(table)
        else:
            self.collected_by_map.append(table)

    @rule(pages_stay=rarely)
    def compact(self, pages_stay: bool) -> None:
        self.allocator.drain()
        announced = self.allocator.stats().bytes_compactable
        before, self.pages_stay = self.allocator.budget.mapped, pages_stay
        self.allocator.compact()
        freed, self.pages_stay = before - self.allocator.budget.mapped, False
        assert freed == 0 if pages_stay else freed >= announced
        # What is left is less than a slab that would exist twice for a time.
        with_free = [each for each in self.allocator.formats if each.free]
        sizes = [max(each.slabs.values()) * each.block_bytes for each in with_free]
        assert pages_stay or all(self.allocator.budget.left < size for size in sizes)

    @rule()
    def tidy(self) -> None:
        before, slabs = self.allocator.budget.mapped, len(self.allocator.slabs)
        is_due = any(len(each.free) > each.reserve for each in self.allocator.formats)
        if self.allocator.tidy() and is_due:
            # Without room to copy pages, slabs may still be joined.
            assert (
                self.allocator.budget.mapped < before
                or MAX_SLABS <= len(self.allocator.slabs) == slabs - 1
            )

    @rule(page_format=formats, number=st.integers(1, 12), pages_stay=rarely)
    def slabs_are_joined_when_there_are_too_many(
        self, page_format: str, number: int, pages_stay: bool
    ) -> None:
        number = min(number, self.allocator.available(page_format))
        self.pages_stay = pages_stay
        slabs, left = len(self.allocator.slabs), self.allocator.budget.left
        self.allocator.ensure_free({page_format: number})
        self.pages_stay = False
        assert len(self.free_blocks(page_format)) >= number
        if len(self.allocator.slabs) > max(slabs, MAX_SLABS):
            rewrite = joining(self.allocator.formats, self.allocator.budget)
            assert pages_stay or rewrite is None or left < BUDGET_BYTES // 2

    @rule()
    def unmap_empty(self) -> None:
        self.allocator.unmap_empty_slabs()
        assert self.allocator.slabs.keys() == set(map(slab_of, self.used_blocks()))

    @rule(number=st.integers(0, 12), page_format=formats)
    def the_lowest_free_blocks_are_handed_out(self, number: int, page_format: str) -> None:
        number = min(number, self.allocator.available(page_format))
        blocks = self.allocator.allocate(number, page_format)
        assert blocks == self.free_blocks(page_format)[:number]
        self.allocator.release(blocks)
        if blocks:
            with pytest.raises(BlockStateError):
                self.allocator.release(blocks[:1])

    @rule(page_format=formats)
    def exhaust(self, page_format: str) -> None:
        available = self.allocator.available(page_format)
        slabs = dict(self.allocator.slabs)
        with pytest.raises(PoolExhausted) as error:
            self.allocator.allocate(available + 1, page_format)
        assert (error.value.needed, error.value.free) == (available + 1, available)
        assert self.allocator.slabs == slabs
        blocks = self.allocator.allocate(available, page_format)
        assert self.used_blocks().isdisjoint(blocks)
        assert {self.format_of(block) for block in blocks} <= {page_format}
        self.allocator.release(blocks)

    @invariant()
    def contents_are_those_of_the_oracle(self) -> None:
        for table, values in self.contents.items():
            rows: list[Any] = []
            for block in table.blocks:
                rows += self.pages[block]
            assert rows[: len(values)] == values
            assert len(table.blocks) == -(-len(values) // PAGE_SIZE)

    @invariant()
    def the_invariants_hold(self) -> None:
        allocator = self.allocator
        assert allocator.capacity == len(self.pages) == sum(allocator.slabs.values())
        assert allocator.budget.mapped == self.bytes_of(self.block_bytes) <= BUDGET_BYTES
        # Checks and stats would drop at once what a finaliser left, but the next rule must find it.
        if not self.allocator._dropped:
            allocator.check()
            stats = allocator.stats()
            assert stats.blocks_used + stats.blocks_free == len(self.pages)
            assert stats.blocks_used == len(self.used_blocks())
            used = Counter(map(self.format_of, self.used_blocks()))
            assert stats.blocks_by_format == {name: used[name] for name in BLOCK_BYTES}
            assert_invariants(stats, allocator.budget.mapped)
            assert stats.table_entries == sum(len(table.blocks) for table in allocator.tables)
            if not self.collected_by_map:
                lengths = [(table, len(values)) for table, values in self.contents.items()]
                assert used_rows(stats) == sum(live_rows(lengths, PAGE_SIZE).values())

    @invariant()
    def what_is_free_is_overwritten(self) -> None:
        for block in self.pages.keys() - self.used_blocks():
            self.pages[block] = [FREED] * PAGE_SIZE

    def teardown(self) -> None:
        for table in list(self.allocator.tables):
            self.allocator.drop(table)
        self.allocator.check()
        assert self.allocator.stats().blocks_used == 0


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = examples(60, stateful_step_count=40)
