"""Allocates the blocks of sequences, which hold them through block tables."""

from collections import Counter
from collections.abc import Mapping

from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.ring import Ring
from paged_kv.allocator.slab_allocator import SlabAllocator
from paged_kv.allocator.slabs import block_range, slab_of


class BlockAllocator(SlabAllocator[BlockTable]):
    """The blocks of one group of layers, and the tables that hold them."""

    def new_table(
        self,
        ring: Ring | None = None,
        page_format: str | None = None,
        first_format: str | None = None,
    ) -> BlockTable:
        """Make an empty block table, known to this allocator until it is dropped. Its full blocks
        get `page_format`, and the first of them `first_format`, if that is another."""
        self.drain()
        name = page_format or self.page_format
        table = BlockTable(self, (), name, first_format or name, ring)
        self.tables.add(table)
        self.events.made(table)
        return table

    def new_scratch(self, page_format: str) -> BlockTable:
        """Make a table of one block, for a page that is needed for a moment.

        Raises:
            PoolExhausted: no block is available.
        """
        self.drain()
        blocks = tuple(self.take_free({page_format: 1})[page_format])
        table = BlockTable(self, (), page_format, page_format, None)
        table.is_scratch = True
        self.tables.add(table)
        table.change(blocks, self.page_size)
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        """Make a second table of the same blocks, adding a reference to each. O(blocks)."""
        self.drain()
        self.retain(table.blocks)
        table.forget_reserved()
        fork = BlockTable(self, (), table.page_format, table.first_format, table.ring)
        self.tables.add(fork)
        fork.change(table.blocks, table.tokens)
        self.events.forked(table, fork)
        return fork

    def check(self) -> None:
        """Verify every invariant; an AssertionError names the one that is broken. O(n log n)."""
        self.drain()
        refs, formats = self.refs, self.formats
        free = [block for slabs in formats for block in slabs.free]
        used = refs.counts
        pages = self.slabs.items()
        mapped = {block for slab, number in pages for block in block_range(slab, number)}
        assert len(free) == len(set(free)), "a block is free twice"
        assert not used.keys() & set(free), "a block is free and used"
        assert used.keys() | set(free) == mapped, "a block is lost, or lies outside every slab"
        refs.check(block for table in self.tables for block in table.blocks)
        in_slab = Counter(map(slab_of, used))
        for slabs in formats:
            assert slabs.used == {slab: in_slab[slab] for slab in slabs.slabs}, "a count is wrong"
            of_first = [self.format_of(block_range(slab, 1)[0]) for slab in slabs.slabs]
            assert all(each is slabs for each in of_first)
            slabs.check()
        cached = Counter(self.format_of(each).name for each in refs.kept if refs.is_cached(each))
        counted = Counter({each.name: each.num_cached for each in formats})
        assert cached == counted, "cached blocks are miscounted"
        self.idle_slots.check(
            [(table.blocks, table.partly_used()) for table in self.tables], formats
        )
        bytes_mapped = sum(each.capacity * each.block_bytes for each in formats)
        assert bytes_mapped <= self.budget.mapped <= self.budget.max_bytes

    def _forget(self, table: BlockTable) -> None:
        assert table.allocator is self, "this table is another allocator's"
        blocks = table.change((), 0)
        self.release(blocks)
        self.tables.discard(table)
        if not table.is_scratch:
            self.events.dropped(table)

    def _move_in_tables(self, moves: Mapping[int, int]) -> None:
        for table in self.tables:
            if not moves.keys().isdisjoint(table.blocks):
                table.blocks = tuple([moves.get(block, block) for block in table.blocks])
                table.note_slots()
