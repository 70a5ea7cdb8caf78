"""Allocates reference-counted blocks of slabs under a byte budget.

The states of a block and the calls that change them:

    free --allocate--> used (1 reference) --retain/release--> used (n) --last release--> free
    used and kept --release by the last table--> cached --match--> used
    cached --evict--> free

    free + used + cached == capacity, at all times

`BlockAllocator.check()` verifies this, and every reference count against the block tables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from itertools import islice

from paged_kv.allocator.byte_budget import ByteBudget, require_positive
from paged_kv.allocator.errors import BlockStateError, PoolExhausted
from paged_kv.allocator.ref_counts import RefCounts
from paged_kv.allocator.slabs import (
    IDLE_STEPS,
    PAGE_BITS,
    FormatSlabs,
    Rewrite,
    block_range,
    bounded,
    by_format,
    compacting,
    giving_back,
    joining,
    merged,
    slab_of,
)

RewriteSlabs = Callable[[Rewrite, int, Mapping[int, int]], bool]
"""Called with (rewrite, number of its new slab, page copies): maps that slab if the rewrite has
one, copies the pages, and unmaps the slabs that are emptied. False if pages cannot move now. Then,
and if it raises, nothing is changed."""


@dataclass(eq=False, repr=False)
class SlabAllocator:
    """The blocks of one group of layers; `BlockAllocator` adds the tables that hold them.

    A block keeps the page format of its slab. To the allocator a format is a name and a number of
    bytes per block.
    """

    budget: ByteBudget  # the bytes that this and other groups may map together
    block_bytes: InitVar[int]  # of one block: the pages of all layers of the group together
    page_size: int = 256  # tokens a block holds
    # Called with (slab, pages, page format) to map a slab; if it raises, nothing is changed.
    map_slab: Callable[[int, int, str], None] = lambda slab, pages, page_format: None
    # Called with (slab) to unmap a slab, or one that a rewrite has unmapped.
    unmap_slab: Callable[[int], None] = lambda slab: None
    rewrite_slabs: RewriteSlabs = lambda rewrite, slab, moves: True
    # Slabs that a kernel takes. `ensure_free` joins slabs instead of mapping more.
    max_slabs: int = sys.maxsize
    page_format: str = "fp16"  # of blocks that are written, and of others unless a call names one
    refs: RefCounts = field(init=False)
    allocation_failures: int = field(default=0, init=False)
    _formats: dict[str, FormatSlabs] = field(default_factory=dict, init=False)
    _slab_format: dict[int, FormatSlabs] = field(default_factory=dict, init=False)
    _may_be_untidy: bool = field(default=False, init=False)

    def __post_init__(self, block_bytes: int) -> None:
        require_positive("page_size", self.page_size)
        self.add_format(self.page_format, block_bytes)
        self.refs = RefCounts(self._count_cached, self._not_used)

    def add_format(self, page_format: str, block_bytes: int) -> FormatSlabs:
        """Add a page format; a known one is returned unchanged."""
        if page_format not in self._formats:
            self._formats[page_format] = FormatSlabs(page_format, block_bytes)
        return self._formats[page_format]

    @property
    def formats(self) -> tuple[FormatSlabs, ...]:
        """The slabs of each format."""
        return tuple(self._formats.values())

    def format_named(self, page_format: str) -> FormatSlabs:
        """The slabs of one format."""
        return self._formats[page_format]

    def format_of(self, block: int) -> FormatSlabs:
        """The format of a block of a mapped slab."""
        return self._slab_format[slab_of(block)]

    def is_writable(self, block: int) -> bool:
        """Whether a block has the format of blocks that are written."""
        return self._slab_format[block >> PAGE_BITS].name == self.page_format

    @property
    def slabs(self) -> dict[int, int]:
        """Pages of each mapped slab."""
        return {slab: pages for each in self.formats for slab, pages in each.slabs.items()}

    @property
    def capacity(self) -> int:
        """Blocks of all mapped slabs."""
        return sum(each.capacity for each in self.formats)

    @property
    def num_used(self) -> int:
        """Used and cached blocks."""
        return sum(each.num_used for each in self.formats)

    def ref_count(self, block: int) -> int:
        """References to a block, including those of dropped tables until `drain`; 0 if free."""
        return self.refs.counts.get(block, 0)

    def available(self, page_format: str | None = None) -> int:
        """Blocks that can be allocated now, including those of slabs to be mapped. O(slabs)."""
        self.drain()
        slabs = self._formats[page_format or self.page_format]
        return len(slabs.free) + self.budget.left // slabs.block_bytes

    def drain(self) -> None:
        """Release what collected sequences hold, so that the reference counts are current."""
        raise NotImplementedError

    def ensure_free(self, needs: Mapping[str, int], ahead_bytes: int | None = None) -> None:
        """Map slabs until `needs` blocks of each format are free; all or nothing.

        Blocks may move, see `RewriteSlabs`. Up to `ahead_bytes` beyond the needs are mapped for
        later steps; None means as much as the budget allows.

        Raises:
            PoolExhausted: the budget does not allow it; nothing was changed.
        """
        self.drain()
        self._grow(needs, ahead_bytes, may_rewrite=True)

    def room_after(self, needs: Mapping[str, int], left: int) -> int:
        """Of `left` bytes that may still be mapped, those that remain once the needed blocks are
        free. `ensure_free` may map more than that, for later steps.

        Raises:
            PoolExhausted: `left` bytes do not suffice.
        """
        for name, count in needs.items():
            slabs = self._formats[name]
            missing = slabs.missing(count)
            if missing * slabs.block_bytes > left:
                free = len(slabs.free) + left // slabs.block_bytes
                raise PoolExhausted(count, free, 0, self.budget.max_bytes, slabs.block_bytes)
            left -= missing * slabs.block_bytes
        return left

    def allocate(self, count: int, page_format: str | None = None) -> list[int]:
        """Allocate the `count` lowest free blocks, with one reference each: all or none.

        O(count + log n). Lowest first, so that high slabs drain and can be unmapped.

        Raises:
            PoolExhausted: too few blocks are available; nothing was changed.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        self.drain()
        name = page_format or self.page_format
        return self.take_free({name: count})[name]

    def take_free(self, needs: Mapping[str, int]) -> dict[str, list[int]]:
        """Allocate `needs` blocks of each format. Unlike `allocate` it drops no table, so a plan
        made from reference counts stays valid."""
        self._grow(needs)
        taken = {name: self._formats[name].take(count) for name, count in needs.items()}
        for blocks in taken.values():
            self.refs.begin(blocks)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a reference from each block; blocks without any become free. O(n log n).

        Raises:
            BlockStateError: a block is named more often than it has references, or is not in
                use; nothing was changed.
        """
        if freed := self.refs.release(list(blocks)):
            self._free(sorted(freed))

    def evict(self, block: int) -> None:
        """Remove the reference of `RefCounts.keep`."""
        self._free(self.refs.evict(block))

    def map(self, slabs: FormatSlabs, slab: int, pages: int) -> None:
        """Map a slab of one of the formats."""
        self.map_slab(slab, pages, slabs.name)
        self.budget.take(pages * slabs.block_bytes)
        slabs.add_slab(slab, pages)
        self._slab_format[slab] = slabs
        self._may_be_untidy = True

    def tidy(self) -> bool:
        """Record a step, and make one rewrite that is due: free pages beyond `FormatSlabs.reserve`
        are given back, and slabs joined if there are more than `max_slabs`. Returns whether there
        was one.

        It copies few pages, so that it can be called between steps. O(formats) if none is due.
        """
        self.drain()
        if not self._may_be_untidy:
            return False
        self._may_be_untidy = False
        for slabs in self.formats:
            if slabs.spare:
                slabs.idle_steps += 1
                for slab in slabs.empty_slabs() if slabs.idle_steps >= IDLE_STEPS else ():
                    self._unmap(slab)
                self._may_be_untidy |= slabs.spare > 0
            if len(slabs.free) > slabs.reserve:
                # Also if the budget has no room for the rewrite now.
                self._may_be_untidy = True
                most = bounded(slabs.num_used)
                rewrite = giving_back(slabs, slabs.reserve, most, self.budget.left)
                if rewrite is not None:
                    return self._rewrite(rewrite)
        if len(self._slab_format) <= self.max_slabs:
            return False
        self._may_be_untidy = True
        joined = joining(self.formats, self.budget)
        return joined is not None and self._rewrite(joined)

    def compact(self) -> int:
        """Give back all free pages, or as many as the budget leaves room to copy others for.
        Returns the number of pages that moved."""
        self.drain()
        moved = 0
        # One format at a time: what it gives back is room to copy another's pages.
        while True:
            rewrites = (compacting(each, self.budget.left) for each in self.formats)
            rewrite = next(filter(None, rewrites), None)
            if rewrite is None:
                return moved
            copied = rewrite.copied
            if not self._rewrite(rewrite):
                return moved
            moved += copied

    def apply_moves(self, moves: Mapping[int, int]) -> None:
        """Update every table and reference count after pages were copied to free blocks, possibly
        of another format."""
        self._move(moves)
        self._free(sorted(moves))

    def unmap_empty_slabs(self) -> int:
        """Unmap every empty slab; returns how many."""
        self.drain()
        empty = [slab for slabs in self.formats for slab in slabs.empty_slabs()]
        for slab in empty:
            self._unmap(slab)
        return len(empty)

    def set_block_bytes(self, block_bytes: Mapping[str, int]) -> None:
        """Correct the bytes of a block of each format, as more of the group's layers become known.

        Raises:
            ValueError: a size is not a positive integer.
            PoolExhausted: the mapped slabs would no longer fit; nothing was changed.
        """
        growth = 0
        for name, size in block_bytes.items():
            require_positive("block_bytes", size)
            slabs = self._formats[name]
            growth += (size - slabs.block_bytes) * slabs.capacity
        if growth > self.budget.left:
            self.allocation_failures += 1
            grown = growth + sum(each.block_bytes * each.capacity for each in self.formats)
            fits = self.capacity * (grown - growth + self.budget.left) // grown
            mean = -(-grown // self.capacity)
            raise PoolExhausted(self.capacity, fits, 0, self.budget.max_bytes, mean)
        self.budget.take(growth)
        for name, size in block_bytes.items():
            self._formats[name].block_bytes = size

    def _grow(
        self, needs: Mapping[str, int], ahead_bytes: int | None = None, *, may_rewrite: bool = False
    ) -> None:
        """Map slabs so that `needs` blocks of each format are free."""
        before = set(self._slab_format)
        try:
            for slabs, pages in self._growth(needs, ahead_bytes):
                if not (may_rewrite and self._grow_a_slab(slabs, pages)):
                    self.map(slabs, self._unused_number(), pages)
        except BaseException:
            for slab in self._slab_format.keys() - before:
                if not self._slab_format[slab].used[slab]:
                    self._unmap(slab)
            raise

    def _growth(
        self, needs: Mapping[str, int], ahead_bytes: int | None
    ) -> list[tuple[FormatSlabs, int]]:
        """The slabs to map, by format and number of pages."""
        try:
            left = self.room_after(needs, self.budget.left)
        except PoolExhausted:
            self.allocation_failures += 1
            raise
        left = left if ahead_bytes is None else min(left, ahead_bytes)
        growth: list[tuple[FormatSlabs, int]] = []
        for name, count in needs.items():
            slabs = self._formats[name]
            if missing := slabs.missing(count):
                sizes = slabs.growth(missing, left, self.budget)
                left -= (sum(sizes) - missing) * slabs.block_bytes
                growth += [(slabs, pages) for pages in sizes]
        return growth

    def _grow_a_slab(self, slabs: FormatSlabs, pages: int) -> bool:
        """Map a slab of `pages` pages that takes those of the smallest ones too, if there are as
        many slabs as a kernel takes. Returns whether it did; it may have joined slabs instead."""
        if len(self._slab_format) < self.max_slabs:
            return False
        grown = merged(slabs, 1, pages, self.budget)
        joined = joining(self.formats, self.budget)
        if joined and (grown is None or joined.cost < grown.cost):
            self._rewrite(joined)
            return False
        return grown is not None and self._rewrite(grown)

    def _rewrite(self, rewrite: Rewrite) -> bool:
        """Make a rewrite; returns whether pages could move and the budget held them."""
        slabs, peak = rewrite.slabs, rewrite.peak_bytes
        if peak > self.budget.left:
            return False
        slab = self._unused_number()
        moves = self._moves_of(rewrite, slab)
        self.budget.take(peak)
        try:
            if not self.rewrite_slabs(rewrite, slab, moves):
                return False
        finally:
            self.budget.take(-peak)
        if rewrite.new_pages:
            slabs.add_slab(slab, rewrite.new_pages)
            self._slab_format[slab] = slabs
        self._move(moves)
        slabs.give(sorted(moves))
        for emptied in rewrite.emptied:
            self._unmap(emptied)
        self.budget.take(rewrite.new_pages * slabs.block_bytes)
        return True

    def _moves_of(self, rewrite: Rewrite, slab: int) -> dict[int, int]:
        """The moves (from block, to block) of a rewrite whose new slab has that number."""
        slabs, counts, emptied = rewrite.slabs, self.refs.counts, set(rewrite.emptied)
        ranges = [block_range(each, slabs.slabs[each]) for each in sorted(emptied)]
        sources = [block for blocks in ranges for block in blocks if block in counts]
        new = block_range(slab, rewrite.new_pages)[: len(sources)]
        others = (block for block in slabs.free if slab_of(block) not in emptied)
        targets = [*islice(others, len(sources) - len(new)), *new]
        return dict(zip(sources, targets, strict=True))

    def _unused_number(self) -> int:
        known = self._slab_format
        return next(slab for slab in range(len(known) + 1) if slab not in known)

    def _move(self, moves: Mapping[int, int]) -> None:
        """Let all that hold blocks hold others. The caller frees the former ones."""
        for source, target in moves.items():
            self.format_of(target).take_block(target)
            on_move = self.refs.move(source, target)
            if on_move is not None:
                on_move(source, target)

    def _unmap(self, slab: int) -> None:
        slabs = self._slab_format.pop(slab)
        self.budget.take(-slabs.remove_slab(slab) * slabs.block_bytes)
        self.unmap_slab(slab)

    def _free(self, blocks: list[int]) -> None:
        """Free blocks, given in ascending order; unmaps slabs that are empty and spare."""
        self._may_be_untidy = True
        by_slabs = by_format(blocks, self._slab_format).items()
        # All blocks are free before a slab is unmapped, which may fail.
        for slabs in [slabs for slabs, theirs in by_slabs if slabs.give(theirs)]:
            for slab in sorted(slabs.empty_slabs(), reverse=True):
                if len(slabs.free) > slabs.reserve:
                    self._unmap(slab)

    def _count_cached(self, block: int, change: int) -> None:
        self.format_of(block).num_cached += change

    def _not_used(self, block: int) -> BlockStateError:
        pages = self.slabs.get(slab_of(block), 0)
        known = block in block_range(slab_of(block), pages)
        return BlockStateError(block, "free" if known else "unknown to this pool")
