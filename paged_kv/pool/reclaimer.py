"""Where the blocks for a step come from, when the budget gets short.

What is free comes first and new slabs next; then what left a ring and was retired is given up,
cached blocks of the prefix index are evicted, pages are made smaller if the pool has a policy for
that, what one group has mapped and does not use is given back for another, and at last everything
is forgotten that only could be found again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.format_slabs import FormatSlabs
from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlock, OutOfWindowBlocks
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.requantisation import RequantisationPolicy, full_blocks
from paged_kv.pool.counts import PoolCounts
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.stats import Compaction, sum_counts

Needs = Mapping[LayerGroup, Mapping[str, int]]
"""Blocks that are to be free in each group, by page format."""


class Reclaimer:
    """Makes room in the groups of one pool.

    Args:
        groups: of the pool.
        budget: the bytes that they may map, maybe with groups of other pools.
        index: whose cached blocks may be evicted.
        retired: what is done without first.
        policy: which pages become smaller, and from when on; None if none do.
        counts: where evictions and requantisations are counted.
    """

    def __init__(
        self,
        groups: list[LayerGroup],
        budget: ByteBudget,
        index: PrefixIndex,
        out_of_window: OutOfWindowBlocks,
        policy: RequantisationPolicy | None,
        counts: PoolCounts,
    ) -> None:
        self._counts = counts
        self._groups = groups
        self._budget = budget
        self._index = index
        self._out_of_window = out_of_window
        self._policy = policy
        watermark = policy.watermark if policy else 1.0
        self._limit = int(watermark * budget.max_bytes)

    def make_room(self, needed: Callable[[], Needs]) -> None:
        """Map slabs until what is needed is free in each group, or none.

        `needed` is asked again when blocks have moved.

        Raises:
            PoolExhausted: the budget does not hold them; no sequence has changed.
        """
        needs = needed()
        if self._mapped_after(needs) > self._limit:
            self._give_up_retired(needed)
            self._evict(needed)
            self._requantise(needed)
            self._make_at_any_price(needed)
            needs = needed()
            self._require(needs)
        for group, counts in needs.items():
            group.allocator.ensure_free(counts)

    def has(self, needs: Needs) -> bool:
        """Whether there is room now, without anything evicted or made smaller. O(slabs)."""
        return self._mapped_after(needs) <= self._limit

    def fits(self, needs: Needs) -> bool:
        """Whether there would be room with cached blocks evicted. O(slabs + cached blocks)."""
        left = {group: Counter(counts) - self._evictable(group) for group, counts in needs.items()}
        return self._mapped_after(left) <= self._budget.max_bytes

    def may_fit(self, needs: Needs) -> bool:
        """Whether the bytes would suffice once pages are as small as the policy makes them, if no
        slab was partly empty. O(used blocks)."""
        smaller = sum(self._bytes_demoted(group, counts) for group, counts in needs.items())
        return smaller <= self._budget.max_bytes

    def evictable(self, group: LayerGroup) -> set[int]:
        """Cached and retired blocks of a group. O(cached blocks)."""
        allocator = group.allocator
        allocator.drain()
        return {*self._index.evictable(allocator), *self._out_of_window.evictable(allocator)}

    def slack(self) -> int:
        """Bytes that may lie idle, because memory is mapped in slabs: when room is made, less than
        a slab of each kind stays partly empty, and what is mapped last gets exactly what is left.
        """
        return self._slack(self._budget)

    def spare_block(self, group: LayerGroup, page_format: str) -> OutOfWindowBlock | None:
        """A block for what can be done without, maybe in the place of what was retired earlier;
        None if there is no room."""
        needs = {group: {page_format: 1}}
        if self._mapped_after(needs) > self._limit:
            self._out_of_window.give_up(lambda: self._mapped_after(needs) <= self._limit)
            if self._mapped_after(needs) > self._limit:
                return None
        blocks = group.allocator.allocate(1, page_format)
        out_of_window = self._out_of_window.cache(group.allocator, blocks[0])
        group.allocator.release(blocks)
        return out_of_window

    def drain(self) -> None:
        """Release what finalisers left."""
        self._out_of_window.drain()
        for group in self._groups:
            if group.is_open:
                group.allocator.drain()

    def give_back(self) -> int:
        """Unmap every slab in which no block is used; returns how many."""
        open_groups = [group for group in self._groups if group.is_open]
        return sum(group.allocator.unmap_empty_slabs() for group in open_groups)

    def compact(self) -> Compaction:
        """Move pages out of the emptiest slabs and give those back; returns what that did."""
        open_groups = [group for group in self._groups if group.is_open]
        slabs = sum(len(group.allocator.slabs) for group in open_groups)
        mapped = self._budget.mapped
        moved = sum(group.compact() for group in open_groups)
        left = sum(len(group.allocator.slabs) for group in open_groups)
        return Compaction(moved, slabs - left, mapped - self._budget.mapped)

    def _make_at_any_price(self, needed: Callable[[], Needs]) -> None:
        """Make room for what would fit if nothing was cached and no slab was partly empty.

        Blocks that somebody uses keep cached ones from being evicted: what comes before them in
        the index, and the rings that were kept beside them.
        """

        def fits() -> bool:
            return self._mapped_after(needed()) <= self._budget.max_bytes

        for attempt in (self.give_back, self.compact, lambda: self._forget(fits), self.compact):
            if fits():
                return
            attempt()

    def _forget(self, is_enough: Callable[[], bool]) -> None:
        self._counts.evictions["exhausted"] += self._index.forget(is_enough)
        # What no prefix ends with any more may still be known to sequences.
        self._give_up(is_enough)

    def _evict(self, needed: Callable[[], Needs]) -> None:
        def is_enough() -> bool:
            return self._mapped_after(needed()) <= self._limit

        self._counts.evictions["room"] += self._index.evict(is_enough)
        self._give_up(is_enough)

    def _give_up_retired(self, needed: Callable[[], Needs]) -> None:
        """Do without what was retired, and the slabs that are left partly empty: before anybody
        else has to do without anything."""

        def is_enough() -> bool:
            return self._mapped_after(needed()) <= self._limit

        if self._give_up(is_enough) and not is_enough():
            for group in self._groups:
                if group.window is not None:
                    group.compact()

    def _give_up(self, is_enough: Callable[[], bool]) -> int:
        given_up = self._out_of_window.give_up(is_enough)
        self._counts.evictions["out_of_window"] += given_up
        return given_up

    def _evictable(self, group: LayerGroup) -> Counter[str]:
        """As `evictable`, by page format."""
        format_of = group.allocator.format_of
        return Counter([format_of(block).name for block in self.evictable(group)])

    def _requantise(self, needed: Callable[[], Needs]) -> None:
        """Make pages smaller until what is needed stays below the policy's watermark, or no page
        can be made smaller. Rings hold the latest tokens only, and are left alone."""
        if self._policy is None:
            return
        groups = [group for group in self._groups if group.is_open and group.window is None]
        while (mapped := self._mapped_after(needed())) > self._limit:
            pressure = mapped / self._budget.max_bytes
            requantised = [group.requantise(self._policy, pressure) for group in groups]
            if not any(requantised):
                return
            self._counts.requantisations.update(sum_counts(requantised))

    def _bytes_demoted(self, group: LayerGroup, counts: Mapping[str, int]) -> int:
        """Bytes of a group's used blocks and of some more, once all pages are as small as the
        policy makes them; the last page of what is more is not full."""
        allocator, policy = group.allocator, self._policy
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

    def _mapped_after(self, needs: Needs) -> int:
        """Bytes mapped when what is needed is free; more than the budget if it does not hold
        them."""
        try:
            return self._budget.max_bytes - self._left_after(needs)
        except PoolExhausted:
            return self._budget.max_bytes + 1

    def _require(self, needs: Needs) -> None:
        left = self._budget.left
        for group, counts in needs.items():
            try:
                left = group.allocator.room_after(counts, left)
            except PoolExhausted as error:
                group.allocator.allocation_failures += 1
                raise error.with_sufficient_budget(self._sufficient_budget(needs)) from None

    def _sufficient_budget(self, needs: Needs) -> int | None:
        """A budget that holds what is in use now and what is needed; None while there are groups
        of which nothing is known."""
        if not all(group.is_open for group in self._groups):
            return None
        formats = self._formats()
        in_use = sum(each.num_used * each.block_bytes for each in formats)
        others = self._budget.mapped - sum(each.capacity * each.block_bytes for each in formats)
        asked = sum(
            count * group.allocator.format_named(name).block_bytes
            for group, counts in needs.items()
            for name, count in counts.items()
        )
        most = in_use + others + asked
        # Slabs get larger with the budget, and with them what may lie idle.
        sufficient = most
        while (with_slack := most + self._slack(ByteBudget(sufficient))) > sufficient:
            sufficient = with_slack
        return sufficient

    def _slack(self, budget: ByteBudget) -> int:
        """`slack` with another budget."""
        largest = [each.largest_slab(budget) * each.block_bytes for each in self._formats()]
        return sum(largest) - min(largest, default=0)

    def _formats(self) -> list[FormatSlabs]:
        """The slabs of every format of every group that was written."""
        groups = [group for group in self._groups if group.is_open]
        return [each for group in groups for each in group.allocator.formats]

    def _left_after(self, needs: Needs) -> int:
        """Bytes of the budget that remain when what is needed is free.

        Raises:
            PoolExhausted: it does not suffice; nothing was changed.
        """
        self.drain()
        left = self._budget.left
        for group, counts in needs.items():
            left = group.allocator.room_after(counts, left)
        return left
