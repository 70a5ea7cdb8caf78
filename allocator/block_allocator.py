"""Hands out blocks by reference count, under a byte budget.

The states of a block and what moves it between them:

    free --allocate--> used (1 reference) --retain/release--> used (n) --last release--> free

    free + used == capacity, at all times

`check()` verifies this, and every reference count against the block tables.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sortedcontainers import SortedList

from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.byte_budget import ByteBudget, require_positive
from paged_kv.allocator.errors import BlockStateError, PoolExhausted
from paged_kv.allocator.ring import Ring
from paged_kv.allocator.slabs import (
    MAX_SLAB_PAGES,
    SlabPlan,
    block_range,
    count_by_slab,
    plan_slabs,
    slab_of,
)


@dataclass(frozen=True)
class AllocatorStats:
    """A snapshot of one allocator; counts are blocks unless a name says bytes."""

    blocks_used: int
    blocks_free: int
    blocks_shared: int
    table_entries: int
    slabs: int
    bytes_mapped: int
    bytes_active: int
    allocation_failures: int
    cow_copies: int


class BlockAllocator:
    """The blocks of one group of layers.

    Args:
        budget: the bytes that this and other groups may map together.
        block_bytes: bytes of one block, the pages of all layers of the group together.
        page_size: tokens a block holds.
        map_slab: called with (slab, pages) when a slab is needed; what it raises leaves
            everything as it was.
        unmap_slab: called with (slab) when a slab is given back.

    Attributes:
        max_slab_pages: the most pages of a slab; lower it where memory has a limit of its own.
    """

    def __init__(
        self,
        budget: ByteBudget,
        block_bytes: int,
        page_size: int = 256,
        map_slab: Callable[[int, int], None] = lambda slab, pages: None,
        unmap_slab: Callable[[int], None] = lambda slab: None,
    ) -> None:
        require_positive("page_size", page_size)
        require_positive("block_bytes", block_bytes)
        self.page_size = page_size
        self.budget = budget
        self.block_bytes = block_bytes
        self.max_slab_pages = MAX_SLAB_PAGES
        self.tables: set[BlockTable] = set()
        self.cow_copies = 0
        self.allocation_failures = 0
        self.slabs: dict[int, int] = {}
        self._map_slab = map_slab
        self._unmap_slab = unmap_slab
        self._free: SortedList[int] = SortedList()
        self._ref_counts: dict[int, int] = {}
        self._used_in_slab: Counter[int] = Counter()
        self._dropped: deque[BlockTable] = deque()

    @property
    def capacity(self) -> int:
        """Blocks of all mapped slabs."""
        return len(self._free) + len(self._ref_counts)

    def ref_count(self, block: int) -> int:
        """References to a block, those of dropped tables included until `drain`; 0 if free."""
        return self._ref_counts.get(block, 0)

    def available(self) -> int:
        """Blocks that can be had now, those of slabs still to be mapped included. O(slabs)."""
        self.drain()
        growth = self._slabs_for(self.budget.left, self.budget.left)
        return len(self._free) + sum(plan.pages for plan in growth)

    def new_table(self, ring: Ring | None = None) -> BlockTable:
        """An empty block table, known to this allocator until it is dropped."""
        self.drain()
        return self._register((), ring)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same blocks, each with one reference more. O(blocks)."""
        self.drain()
        self.retain(table.blocks)
        table.forget_reserved()
        return self._register(table.blocks, table.ring)

    def drop(self, table: BlockTable) -> None:
        """Release a table's blocks and forget it."""
        self.drain()
        self._forget(table)

    def drop_later(self, table: BlockTable) -> None:
        """Drop a table at the next call. For finalisers, which may run in the middle of one."""
        self._dropped.append(table)

    def drain(self) -> None:
        """Drop the tables that finalisers left, so that reference counts are those of now."""
        # Finalisers append in the middle of anything; both operations are atomic.
        while self._dropped:
            self._forget(self._dropped.popleft())

    def ensure_free(self, count: int) -> None:
        """Map slabs until `count` blocks are free.

        Raises:
            PoolExhausted: the budget does not allow it; nothing was changed.
        """
        self.drain()
        self._grow(count)

    def room_after(self, count: int, left: int) -> int:
        """What remains of `left` bytes when slabs were mapped until `count` blocks are free.

        Raises:
            PoolExhausted: they do not suffice.
        """
        pages = sum(plan.pages for plan in self._plan(count, left))
        return left - pages * self.block_bytes

    def _plan(self, count: int, left: int) -> list[SlabPlan]:
        missing = count - len(self._free)
        plans = self._slabs_for(missing, left)
        growth = sum(plan.pages for plan in plans)
        if growth < missing:
            free = len(self._free) + growth
            raise PoolExhausted(count, free, 0, self.budget.max_bytes)
        return plans

    def _slabs_for(self, needed: int, left: int) -> list[SlabPlan]:
        return plan_slabs(
            needed, left, self.slabs, self.budget, self.block_bytes, self.max_slab_pages
        )

    def _grow(self, count: int) -> None:
        try:
            plans = self._plan(count, self.budget.left)
        except PoolExhausted:
            self.allocation_failures += 1
            raise
        mapped: list[int] = []
        try:
            for plan in plans:
                self._map(plan.slab, plan.pages)
                mapped.append(plan.slab)
        except BaseException:
            for slab in mapped:
                self._unmap(slab)
            raise

    def allocate(self, count: int) -> list[int]:
        """The `count` free blocks of lowest id, with one reference each: all or none.

        O(count + log n). Lowest first, so that high slabs drain and can be given back.

        Raises:
            PoolExhausted: there are not enough; nothing was changed.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        self.drain()
        return self.take_free(count)

    def take_free(self, count: int) -> list[int]:
        """As `allocate`, but drops no table, so that a plan made from reference counts holds."""
        self._grow(count)
        if count == 1:
            blocks = [self._free.pop(0)]
        else:
            blocks = list(self._free[:count])
            del self._free[:count]
        ref_counts = self._ref_counts
        for block in blocks:
            ref_counts[block] = 1
        for slab, taken in count_by_slab(blocks):
            self._used_in_slab[slab] += taken
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block.

        Raises:
            BlockStateError: one of them is not in use; nothing was changed.
        """
        blocks = list(blocks)
        for block in blocks:
            if block not in self._ref_counts:
                raise self._not_used(block)
        for block in blocks:
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take a reference from each block; those without any become free. O(n log n).

        Raises:
            BlockStateError: a block is named more often than it has references, or is not in
                use; nothing was changed.
        """
        blocks = list(blocks)
        freed: list[int] = []
        ref_counts = self._ref_counts
        for done, block in enumerate(blocks):
            count = ref_counts.pop(block, 0)
            if count == 1:
                freed.append(block)
            elif count > 1:
                ref_counts[block] = count - 1
            else:
                ref_counts.update(Counter(ref_counts) + Counter(blocks[:done]))
                raise self._not_used(block)
        if freed:
            self._add_free(sorted(freed))

    def compaction_plan(self) -> dict[int, int]:
        """Moves (from block, to block) that empty the emptiest slabs into the others' free pages.

        No move needs a page that is not free now, and none goes into a slab that is emptied.
        """
        self.drain()
        victims = self._slabs_to_empty()
        targets = (block for block in self._free if slab_of(block) not in victims)
        sources = sorted(block for block in self._ref_counts if slab_of(block) in victims)
        return dict(zip(sources, targets, strict=False))

    def apply_moves(self, moves: dict[int, int]) -> None:
        """Let every table and reference count follow blocks whose pages were copied."""
        for source, target in moves.items():
            self._free.remove(target)
            self._ref_counts[target] = self._ref_counts.pop(source)
            self._used_in_slab[slab_of(target)] += 1
        for table in self.tables:
            table.blocks = tuple(moves.get(block, block) for block in table.blocks)
        self._add_free(list(moves))

    def unmap_empty_slabs(self) -> int:
        """Give back every slab in which no block is used; returns how many."""
        self.drain()
        empty = [slab for slab in self.slabs if not self._used_in_slab[slab]]
        for slab in empty:
            self._unmap(slab)
        return len(empty)

    def set_block_bytes(self, block_bytes: int) -> None:
        """Correct the size of a block, as more of its group's layers become known.

        Raises:
            ValueError: it is not a positive integer.
            PoolExhausted: what is mapped would no longer fit; nothing was changed.
        """
        require_positive("block_bytes", block_bytes)
        growth = (block_bytes - self.block_bytes) * self.capacity
        if growth > self.budget.left:
            self.allocation_failures += 1
            room = self.budget.left + self.capacity * self.block_bytes
            raise PoolExhausted(self.capacity, room // block_bytes, 0, self.budget.max_bytes)
        self.budget.take(growth)
        self.block_bytes = block_bytes

    def stats(self) -> AllocatorStats:
        """A snapshot. O(used blocks)."""
        self.drain()
        used = len(self._ref_counts)
        return AllocatorStats(
            blocks_used=used,
            blocks_free=len(self._free),
            blocks_shared=sum(count > 1 for count in self._ref_counts.values()),
            table_entries=sum(len(table.blocks) for table in self.tables),
            slabs=len(self.slabs),
            bytes_mapped=self.capacity * self.block_bytes,
            bytes_active=used * self.block_bytes,
            allocation_failures=self.allocation_failures,
            cow_copies=self.cow_copies,
        )

    def check(self) -> None:
        """Verify every invariant; an AssertionError names the one that is broken. O(n log n)."""
        self.drain()
        free = list(self._free)
        used = self._ref_counts
        mapped = {block for slab, pages in self.slabs.items() for block in block_range(slab, pages)}
        assert free == sorted(set(free)), "a block is free twice"
        assert not used.keys() & set(free), "a block is free and used"
        assert used.keys() | set(free) == mapped, "a block is lost, or lies outside every slab"
        entries = Counter(block for table in self.tables for block in table.blocks)
        assert dict(entries) == used, "references and table entries differ"
        assert +self._used_in_slab == Counter(map(slab_of, used)), "a slab's count is wrong"
        assert self.capacity * self.block_bytes <= self.budget.mapped <= self.budget.max_bytes

    def _register(self, blocks: tuple[int, ...], ring: Ring | None) -> BlockTable:
        table = BlockTable(self, blocks, ring)
        self.tables.add(table)
        return table

    def _forget(self, table: BlockTable) -> None:
        assert table.allocator is self, "this table is another allocator's"
        self.release(table.blocks)
        table.blocks = ()
        self.tables.discard(table)

    def _map(self, slab: int, pages: int) -> None:
        self._map_slab(slab, pages)
        self.budget.take(pages * self.block_bytes)
        self.slabs[slab] = pages
        self._free.update(block_range(slab, pages))

    def _unmap(self, slab: int) -> None:
        pages = self.slabs.pop(slab)
        first = self._free.bisect_left(block_range(slab, pages).start)
        del self._free[first : first + pages]
        self.budget.take(-pages * self.block_bytes)
        self._unmap_slab(slab)

    def _add_free(self, blocks: list[int]) -> None:
        """Make blocks free, given in ascending order."""
        if len(blocks) == 1:
            self._free.add(blocks[0])
        else:
            self._free.update(blocks)
        for slab, freed in count_by_slab(blocks):
            self._used_in_slab[slab] -= freed
            if not self._used_in_slab[slab]:
                self._give_back(slab)

    def _give_back(self, slab: int) -> None:
        """Unmap an empty slab, unless the pages left would soon have to be mapped again.

        Keeping half a slab free elsewhere means that at least that many blocks must be
        allocated before a slab is mapped again: sequences that come and go at the edge of a
        slab do not map and unmap it each time.
        """
        pages = self.slabs[slab]
        if 2 * (len(self._free) - pages) >= pages:
            self._unmap(slab)

    def _slabs_to_empty(self) -> set[int]:
        """The emptiest slabs whose blocks fit into the free pages of the slabs that stay."""

        def emptiest_first(slab: int) -> tuple[float, int]:
            return self._used_in_slab[slab] / self.slabs[slab], -self.slabs[slab]

        victims: set[int] = set()
        room = len(self._free)
        for slab in sorted(self.slabs, key=emptiest_first):
            # Emptying a slab takes all its pages from the room: the free ones go with it, and
            # each used one fills a free page elsewhere.
            if self.slabs[slab] <= room:
                victims.add(slab)
                room -= self.slabs[slab]
        return victims

    def _not_used(self, block: int) -> BlockStateError:
        pages = self.slabs.get(slab_of(block), 0)
        known = block in block_range(slab_of(block), pages)
        return BlockStateError(block, "free" if known else "unknown to this pool")
