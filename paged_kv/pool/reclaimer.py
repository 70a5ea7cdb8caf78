"""Reserves blocks for a step before any layer writes, and reclaims memory if the budget is short.

The order: free blocks, new slabs, eviction of cached out-of-window blocks, eviction of blocks of
the prefix index, and of those that are held, requantisation if the pool has a policy, unmapping
of one group's empty slabs for another, compaction, the same in other pools that share the budget,
and at last eviction of all unpinned prefixes.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import partial

from paged_kv.allocator.allocator_stats import sum_counts
from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget, Reclaims
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.prefixes.prefix_node import OutOfWindowBlock, OutOfWindowBlocks
from paged_kv.allocator.requantisation import RequantisationPolicy, full_blocks
from paged_kv.allocator.slabs import FormatSlabs
from paged_kv.allocator.writes import Write, blocks_needed, reserve_all
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageFormat
from paged_kv.offload.offloading import OffloadError
from paged_kv.pool.layer_group import LayerGroup, Needs
from paged_kv.pool.stats import Compaction, PoolCounts

# Of what another pool uses, this share is evicted at a time for a pool that is short of memory, and
# compacted: less of it goes than with larger ones, and more is copied.
EVICTED_SHARE = 16

Writes = Mapping[LayerGroup, list[Write]]


@dataclass(eq=False, repr=False)
class Reclaimer:
    """Reclaims memory in the groups of one pool."""

    groups: list[LayerGroup]
    budget: ByteBudget  # the bytes that they may map, possibly shared with other pools
    index: PrefixIndex  # its cached blocks may be evicted, those with holds last
    out_of_window: OutOfWindowBlocks  # which are evicted first
    policy: RequantisationPolicy | None  # chooses pages to requantise, and when
    counts: PoolCounts  # of evictions and requantisations

    def __post_init__(self) -> None:
        watermark = self.policy.watermark if self.policy else 1.0
        self._limit = int(watermark * self.budget.max_bytes)
        self.budget.reclaimers.add(self)

    def __del__(self) -> None:
        # The pool is collected, and nobody refers to its blocks. Their groups refer to each other,
        # and would keep their memory until Python finds that.
        self.budget.abandoned.append(partial(_unmap, self.groups))

    def open_groups(self) -> list[LayerGroup]:
        """The groups that were written, so that their block sizes are known."""
        return [group for group in self.groups if group.is_open]

    def formats(self) -> list[FormatSlabs]:
        """The slabs of every format of every open group."""
        return [each for group in self.open_groups() for each in group.allocator.formats]

    def reserve(self, writes: Writes) -> None:
        """Reserve blocks for all writes, and copy shared pages before a table refers to the copies.
        If pages are requantised for that, it goes page by page, so that the first pages of a step
        can be requantised for its last ones.

        Raises:
            PoolExhausted: the budget does not hold them all.
            BaseException: what copying raises, such as a `ThreadConflict`. After either no table
                has changed; with a policy, tables may have reserved their first pages.
        """
        if self.policy is None or self._fits(_needs_of(writes)):
            self._reserve_together(writes)
        else:
            self._reserve_by_page(writes)

    def make_room(self, needed: Callable[[], Needs]) -> None:
        """Reclaim memory and map slabs until the needed blocks are free in every group.

        `needed` is called again after blocks moved.

        Raises:
            PoolExhausted: the budget does not hold them; no sequence has changed. Its cause is an
                `OffloadError`, if pages could not go out of memory.
        """
        needs = needed()
        if not self._fits(needs):
            failure = self._reclaim(needed)
            # Pages that could not go yet find room above the watermark later.
            most = self.budget.max_bytes if failure is None else self._limit
            self._reclaim_everything(lambda: self._mapped_after(needed()) <= most)
            needs = needed()
            self._require(needs, most, failure)
        for group, counts in needs.items():
            ahead = self._limit - self._mapped_after(needs)
            group.allocator.ensure_free(counts, max(0, ahead))

    def can_admit(self, tokens: int, page_format: PageFormat) -> bool:
        """Whether a new sequence of `tokens` tokens could be written now, in steps of any size.

        If pages are requantised while a sequence is written, the answer depends on how slabs of
        several formats fill the budget. No formula gives that exactly, so a dry run makes the real
        steps. O(slabs + cached blocks), and O(pages of the sequence * table entries) in that case.
        """
        needs = {group: group.needs_of(tokens) for group in self.open_groups()}
        left = {group: Counter(counts) - self._evictable(group) for group, counts in needs.items()}
        beside = sum(other.reclaimable() for other in self._others())
        if self._mapped_after(left, beside) <= self.budget.max_bytes:
            return True
        if self.policy is None:
            return False
        # If no slab was partly empty.
        smaller = sum(self._bytes_requantised(group, counts) for group, counts in needs.items())
        return smaller <= self.budget.max_bytes and self._dry_run(tokens, page_format)

    def tidy(self) -> bool:
        """Give back memory that is no longer needed, a little of each group. Call it between
        steps. Returns whether there may be more."""
        are_untidy = [group.allocator.tidy() for group in self.open_groups()]
        return any(are_untidy)

    def holding_more(self, budget: int, nbytes: int) -> int:
        """A budget that holds `nbytes` of blocks more than another one does."""
        return self.holding(budget - self.slack(ByteBudget(budget)) + nbytes)

    def holding(self, nbytes: int, least: int = 1) -> int:
        """A budget of at least so many bytes that holds `nbytes` of blocks."""
        budget = max(nbytes, least)
        # Larger budgets have larger slabs, and so more slack.
        while (with_slack := nbytes + self.slack(ByteBudget(budget))) > budget:
            budget = with_slack
        return budget

    @property
    def bytes_held(self) -> int:
        """Bytes of used and cached blocks, and of what other pools have mapped."""
        return self.budget.mapped - self._bytes_free()

    def slack(self, budget: ByteBudget) -> int:
        """Bytes of a budget that may stay unused because memory is mapped in slabs: after
        reclaiming, each format of each group leaves less than a slab empty, but for the one that is
        mapped last, which gets exactly the rest."""
        largest = [each.largest_slab(budget) * each.block_bytes for each in self.formats()]
        return sum(largest) - min(largest, default=0)

    def spare_block(self, group: LayerGroup) -> OutOfWindowBlock | None:
        """A block for an optional page, possibly after evicting older out-of-window blocks; None if
        the budget does not hold one."""
        needs = {group: {group.allocator.page_format: 1}}
        if not self._fits(needs):
            self.out_of_window.evict(lambda: self._fits(needs))
            if not self._fits(needs):
                return None
        group.allocator.ensure_free(needs[group], 0)
        blocks = group.allocator.allocate(1)
        try:
            return self.out_of_window.cache(group.allocator, blocks[0])
        finally:
            group.allocator.release(blocks)

    def reclaimable(self) -> int:
        """See `Reclaims`."""
        cached = [
            group.allocator.format_of(block).block_bytes
            for group in self.open_groups()
            for block in self._evictable_blocks(group)
        ]
        return self._bytes_free() + sum(cached)

    def give_way(self, fits: Callable[[], bool]) -> None:
        """See `Reclaims`."""
        self.drain()
        for attempt in (self.give_back, self.compact):
            if fits():
                return
            attempt()
        while not fits() and self._evict_a_share():
            self.compact()
        if not fits():
            self._forget(fits)
            self.compact()

    def drain(self) -> None:
        """Release the blocks of collected sequences, and the memory of collected pools."""
        self.budget.drain()
        self.out_of_window.drain()
        for group in self.open_groups():
            group.drain()

    def give_back(self) -> int:
        """Unmap every empty slab; returns how many."""
        return sum(group.allocator.unmap_empty_slabs() for group in self.open_groups())

    def compact(self) -> Compaction:
        """See `PagePool.compact`."""
        open_groups = self.open_groups()
        slabs = sum(len(group.allocator.slabs) for group in open_groups)
        mapped = self.budget.mapped
        moved = sum(group.allocator.compact() for group in open_groups)
        left = sum(len(group.allocator.slabs) for group in open_groups)
        return Compaction(moved, slabs - left, mapped - self.budget.mapped)

    def _reclaim(self, needed: Callable[[], Needs]) -> OffloadError | None:
        """Evict cached blocks and requantise pages until the needs fit below the policy's
        watermark. Out-of-window blocks go first, and their groups are compacted before anything
        else is evicted. Returns why pages could not go out of memory, if so."""

        def is_enough() -> bool:
            return self._fits(needed())

        if self._evict_out_of_window(is_enough) and not is_enough():
            for group in self.open_groups():
                if group.window is not None:
                    group.allocator.compact()
        self._evict_prefixes(is_enough)
        self._evict_out_of_window(is_enough)
        return None if self.policy is None else self._requantise(self.policy, needed)

    def _reclaim_everything(self, fits: Callable[[], bool]) -> None:
        """Unmap empty slabs, compact, let other pools do the same, evict all unpinned prefixes,
        compact again; stop as soon as the needs fit.

        Ordinary eviction spares cached blocks that depend on used ones: their predecessors in the
        index, and the window blocks kept with them.
        """
        attempts: list[Callable[[], object]] = [self.give_back, self.compact]
        attempts += [partial(other.give_way, fits) for other in self._others()]
        attempts += [partial(self._forget, fits), self.compact]
        for attempt in attempts:
            if fits():
                return
            attempt()

    def _others(self) -> list[Reclaims]:
        """Those of other pools that share the budget."""
        return [other for other in self.budget.reclaimers if other is not self]

    def _evict_a_share(self) -> bool:
        """Evict cached blocks, a share of all bytes that are used; returns whether there were."""
        before = self._bytes_used()

        def is_enough() -> bool:
            return self._bytes_used() < before - before // EVICTED_SHARE

        self._evict_out_of_window(is_enough)
        self._evict_prefixes(is_enough)
        return self._bytes_used() < before

    def _bytes_free(self) -> int:
        return sum(len(each.free) * each.block_bytes for each in self.formats())

    def _bytes_used(self) -> int:
        return sum(each.num_used * each.block_bytes for each in self.formats())

    def _forget(self, is_enough: Callable[[], bool]) -> None:
        self.counts.evictions["exhausted"] += self.index.forget(is_enough)
        # Sequences may still refer to out-of-window blocks that no prefix ends with any more.
        self._evict_out_of_window(is_enough)

    def _evict_prefixes(self, is_enough: Callable[[], bool]) -> None:
        self.counts.evictions["room"] += self.index.evict(is_enough)

    def _evict_out_of_window(self, is_enough: Callable[[], bool]) -> int:
        evicted = self.out_of_window.evict(is_enough)
        self.counts.evictions["out_of_window"] += evicted
        return evicted

    def _evictable_blocks(self, group: LayerGroup) -> set[int]:
        """Evictable blocks of a group, in the prefix index and out of window. O(cached blocks)."""
        allocator = group.allocator
        allocator.drain()
        return {*self.index.evictable(allocator), *self.out_of_window.evictable(allocator)}

    def _evictable(self, group: LayerGroup) -> Counter[str]:
        """Their number by page format."""
        format_of = group.allocator.format_of
        return Counter([format_of(block).name for block in self._evictable_blocks(group)])

    def _requantise(
        self, policy: RequantisationPolicy, needed: Callable[[], Needs]
    ) -> OffloadError | None:
        """Requantise pages until the needs stay below the policy's watermark, or no page is left to
        requantise. Groups with a window are spared: they hold only the latest tokens. No page gets
        smaller while others are free. Returns why pages could not go out of memory, if so."""
        if self._fits(needed()):
            return None
        self.compact()
        groups = [group for group in self.open_groups() if group.window is None]
        while (mapped := self._mapped_after(needed())) > self._limit:
            pressure = mapped / self.budget.max_bytes
            try:
                requantised = [group.requantise(policy, pressure) for group in groups]
            except OffloadError as failure:
                return OffloadError(*failure.args)  # frames of the other hold the step's tables
            if not any(requantised):
                return None
            self.counts.requantisations.update(sum_counts(requantised))
        return None

    def _bytes_requantised(self, group: LayerGroup, counts: Mapping[str, int]) -> int:
        """Bytes of a group's used blocks and of `counts` more, after requantisation of all full
        pages; in each format of `counts` the last page is not full."""
        allocator, policy = group.allocator, self.policy
        used = Counter({each.name: each.num_used for each in allocator.formats})
        blocks = used - self._evictable(group) + Counter(counts)
        if policy is not None and group.window is None:
            full = {each.block for each in policy.requantisations(full_blocks(allocator), math.inf)}
            for block in full:
                blocks[allocator.format_of(block).name] -= 1
            more = sum(counts.values()) - len(counts)
            blocks[group.page_format.name] -= more
            blocks[policy.page_formats[-1]] += len(full) + more
        return sum(allocator.format_named(name).block_bytes * n for name, n in blocks.items())

    def _fits(self, needs: Needs) -> bool:
        """Whether the needs fit below the policy's watermark. O(slabs)."""
        return self._mapped_after(needs) <= self._limit

    def _mapped_after(self, needs: Needs, beside: int = 0) -> int:
        """Bytes mapped after the needs are free, if other pools give back `beside` bytes; more than
        the budget if it does not hold them."""
        self.drain()
        left = self.budget.left + beside
        try:
            for group, counts in needs.items():
                left = group.allocator.room_after(counts, left)
        except PoolExhausted:
            return self.budget.max_bytes + 1
        return self.budget.max_bytes - left

    def _require(self, needs: Needs, most: int, failure: OffloadError | None) -> None:
        left = self.budget.left - (self.budget.max_bytes - most)
        for group, counts in needs.items():
            try:
                left = group.allocator.room_after(counts, left)
            except PoolExhausted as error:
                group.allocator.allocation_failures += 1
                enough = self._sufficient_budget(needs)
                raise replace(error, sufficient_budget=enough) from failure

    def _sufficient_budget(self, needs: Needs) -> int | None:
        """A budget that holds the used blocks and the needs; None while a group has not written, so
        that its block size is unknown."""
        if self.open_groups() != self.groups:
            return None
        requested = sum(
            count * group.allocator.format_named(name).block_bytes
            for group, counts in needs.items()
            for name, count in counts.items()
        )
        return self.holding(self.bytes_held + requested)

    def _reserve_together(self, writes: Writes) -> None:
        if not all(each.is_owned for theirs in writes.values() for each in theirs):
            self.make_room(lambda: _needs_of(writes))
        reserve_all([(theirs, group.copy_pages) for group, theirs in writes.items()])

    def _reserve_by_page(self, writes: Writes) -> None:
        by_page = {group: [write.by_page() for write in theirs] for group, theirs in writes.items()}
        rounds = max([len(pages) for theirs in by_page.values() for pages in theirs], default=0)
        for at in range(rounds):
            self._reserve_together(
                {
                    group: [pages[at] for pages in theirs if at < len(pages)]
                    for group, theirs in by_page.items()
                }
            )

    def _dry_run(self, tokens: int, page_format: PageFormat) -> bool:
        """Whether blocks for a new sequence can be reserved in copies of the allocators."""
        mapped = sum(each.capacity * each.block_bytes for each in self.formats())
        free = ByteBudget(self.budget.max_bytes, self.budget.mapped - mapped)
        copies = []
        for group in self.open_groups():
            twin = copy.copy(group)
            twin.allocator = _copy_of(group.allocator, free, self._evictable_blocks(group))
            twin.pages, twin.offloading = {}, None
            copies.append(twin)
        index = PrefixIndex(PAGE_SIZE, free.lock)
        others = Reclaimer(copies, free, index, OutOfWindowBlocks(), self.policy, PoolCounts())
        writes = {group: [Write(group.new_table(page_format), 0, tokens)] for group in copies}
        try:
            others._reserve_by_page(writes)
        except PoolExhausted:
            return False
        return True


def _needs_of(writes: Writes) -> Needs:
    return {group: blocks_needed(theirs) for group, theirs in writes.items()}


def _unmap(groups: list[LayerGroup]) -> None:
    for group in groups:
        group.abandon()


def _copy_of(
    allocator: BlockAllocator, budget: ByteBudget, unwanted: Container[int]
) -> BlockAllocator:
    """A copy with the same slabs, tables and used blocks. `budget` counts the copy's slabs. The
    `unwanted` blocks, which no table may hold, are free in it. O(slabs + table entries)."""
    first, *others = allocator.formats
    other = BlockAllocator(
        budget,
        first.block_bytes,
        allocator.page_size,
        page_format=first.name,
        max_slabs=allocator.max_slabs,
    )
    for theirs in (first, *others):
        slabs = other.add_format(theirs.name, theirs.block_bytes)
        slabs.max_slab_pages, slabs.page_bytes = theirs.max_slab_pages, theirs.page_bytes
        for slab, pages in theirs.slabs.items():
            other.map(slabs, slab, pages)
    for block in allocator.refs.counts:
        if block not in unwanted:
            other.format_of(block).take_block(block)
    other.refs.begin([block for block in allocator.refs.kept if block not in unwanted])
    for table in allocator.tables:
        twin = other.new_table(table.ring, table.page_format, table.first_format)
        first_held = [block for block in table.blocks if not other.ref_count(block)]
        other.refs.retain([block for block in table.blocks if other.ref_count(block)])
        other.refs.begin(first_held)
        twin.change(table.blocks, table.tokens)
        twin.last_reserved = table.last_reserved
    other.tokens_reserved = allocator.tokens_reserved
    return other
