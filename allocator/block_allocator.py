"""Allocates the blocks of sequences, which hold them through block tables."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import or_

from paged_kv.allocator.allocator_stats import AllocatorStats, metadata_bytes
from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.rewriting import compacting
from paged_kv.allocator.ring import Ring, UsedSlots
from paged_kv.allocator.slab_allocator import SlabAllocator
from paged_kv.allocator.slabs import MAX_SLAB_PAGES, PAGE_BITS, block_range, slab_of

# The states of a block in a `SlabMap`: free, held by one table, shared by several, and cached.
FREE, USED, SHARED, CACHED = ".usc"


@dataclass(frozen=True)
class SlabMap:
    """The blocks of a slab.

    Attributes:
        slab: its number in its group.
        page_format: the format of all its pages.
        states: a letter for each block.
    """

    slab: int
    page_format: str
    states: str


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
        return fork

    def stats(self) -> AllocatorStats:
        """A snapshot. O(slabs + tables), and O(entries) for rings."""
        self.drain()
        return self.snapshot()

    def snapshot(self) -> AllocatorStats:
        """As `stats`, but keeps the blocks of collected sequences; safe for observer threads."""
        refs, left = self.refs, self.budget.left
        last_block, out_of_window = self._idle_slots()
        formats = []
        for each in self.formats:
            rewrite = compacting(each, left)
            compactable = rewrite.freed if rewrite else 0
            left += compactable * each.block_bytes
            idle = last_block[each.name], out_of_window[each.name]
            formats.append(each.stats(self.page_size, *idle, compactable))
        free = sum(len(each.free) for each in self.formats)
        entries = refs.total - len(refs.kept)
        return AllocatorStats(
            formats=tuple(formats),
            blocks_shared=refs.shared,
            table_entries=entries,
            tables=len(self.tables),
            tables_dropped=len(self._dropped),
            cow_copies=self.cow_copies,
            allocation_failures=self.allocation_failures,
            bytes_metadata=metadata_bytes(refs.counts, free, len(self.tables), entries),
        )

    def block_map(self) -> Callable[[], list[SlabMap]]:
        """Copy the reference counts, and return a function that makes the map of all slabs from the
        copy. Hold the lock for this call only. Both are O(blocks)."""
        slabs = {slab: (each.name, n) for each in self.formats for slab, n in each.slabs.items()}
        counts, kept = dict(self.refs.counts), list(self.refs.kept)

        def states() -> list[SlabMap]:
            letters = {slab: bytearray(FREE.encode() * n) for slab, (_, n) in slabs.items()}
            used, shared, cached = USED.encode()[0], SHARED.encode()[0], CACHED.encode()[0]
            mask = MAX_SLAB_PAGES - 1
            for block, count in counts.items():
                letters[block >> PAGE_BITS][block & mask] = used if count == 1 else shared
            for block in kept:
                holders = counts[block]
                # One of the references is that of `keep`.
                letters[block >> PAGE_BITS][block & mask] = (
                    cached if holders == 1 else used if holders == 2 else shared
                )
            return [SlabMap(slab, slabs[slab][0], letters[slab].decode()) for slab in sorted(slabs)]

        return states

    def _idle_slots(self) -> tuple[Counter[str], Counter[str]]:
        """The slots of used blocks that hold no live token, by format: those after the last token,
        and those out of the window. A slot of a shared block is idle if none of its tables uses
        it."""
        used: dict[int, list[UsedSlots]] = {}
        for table in self.tables:
            for block, slots in table.partly_used().items():
                used.setdefault(block, []).append(slots)
        last_block: Counter[str] = Counter()
        out_of_window: Counter[str] = Counter()
        for block, views in used.items():
            if len(views) < self.refs.holders(block):
                continue  # another table uses all of its slots
            written = reduce(or_, [slots.written for slots in views])
            live = reduce(or_, [slots.live for slots in views])
            name = self.format_of(block).name
            last_block[name] += self.page_size - written.bit_count()
            out_of_window[name] += (written & ~live).bit_count()
        return last_block, out_of_window

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
        bytes_mapped = sum(each.capacity * each.block_bytes for each in formats)
        assert bytes_mapped <= self.budget.mapped <= self.budget.max_bytes

    def _forget(self, table: BlockTable) -> None:
        assert table.allocator is self, "this table is another allocator's"
        blocks = table.change((), 0)
        self.release(blocks)
        self.tables.discard(table)

    def _move_in_tables(self, moves: Mapping[int, int]) -> None:
        for table in self.tables:
            if not moves.keys().isdisjoint(table.blocks):
                table.blocks = tuple([moves.get(block, block) for block in table.blocks])


def packed(states: str) -> str:
    """Run-length encode a map's states: a run of n equal ones is the letter followed by n, or the
    letter alone if n is 1, as in "u3.c12"."""
    runs = [(letter, len(list(run))) for letter, run in groupby(states)]
    return "".join(letter if n == 1 else f"{letter}{n}" for letter, n in runs)


def unpacked(text: str) -> str:
    """Decode the output of `packed`.

    Raises:
        ValueError: `text` is not such an output.
    """
    if not re.fullmatch(r"([.usc]\d{0,6})*", text, re.ASCII):
        raise ValueError(f"{text[:40]!r} is no map of blocks: expected letters of .usc and numbers")
    runs = re.findall(r"([.usc])(\d*)", text, re.ASCII)
    return "".join(letter * int(n or 1) for letter, n in runs)
