"""Where the blocks for a step come from, when the budget gets short.

What is free comes first and new slabs next; then cached blocks of the prefix index are evicted,
pages are made smaller if the pool has a policy for that, what one group has mapped and does not use
is given back for another, and at last everything is forgotten that only could be found again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.demotion import DemotionPolicy
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefix_index import PrefixIndex
from paged_kv.layer_group import LayerGroup
from paged_kv.pool_counts import PoolCounts
from paged_kv.stats import Compaction, sum_counts

Needs = Mapping[LayerGroup, Mapping[str, int]]
"""Blocks that are to be free in each group, by page format."""


class PoolRoom:
    """Makes room in the groups of one pool.

    Args:
        groups: of the pool.
        budget: the bytes that they may map, maybe with groups of other pools.
        index: whose cached blocks may be evicted.
        policy: which pages become smaller, and from when on; None if none do.
        counts: where evictions and demotions are counted.
    """

    def __init__(
        self,
        groups: list[LayerGroup],
        budget: ByteBudget,
        index: PrefixIndex,
        policy: DemotionPolicy | None,
        counts: PoolCounts,
    ) -> None:
        self._counts = counts
        self._groups = groups
        self._budget = budget
        self._index = index
        self._policy = policy
        watermark = policy.watermark if policy else 1.0
        self._limit = int(watermark * budget.max_bytes)

    def make(self, needed: Callable[[], Needs]) -> None:
        """Map slabs until what is needed is free in each group, or none.

        `needed` is asked again when blocks have moved.

        Raises:
            PoolExhausted: the budget does not hold them; no sequence has changed.
        """
        needs = needed()
        if self._mapped_after(needs) > self._limit:
            self._evict(needed)
            self._demote(needed)
            self._make_at_any_price(needed)
            needs = needed()
            self._require(needs)
        for group, counts in needs.items():
            group.allocator.ensure_free(counts)

    def fits(self, needs: Needs) -> bool:
        """Whether there would be room, with cached blocks evicted. O(slabs + cached blocks)."""
        left = {group: Counter(counts) - self._evictable(group) for group, counts in needs.items()}
        return self._mapped_after(left) <= self._budget.max_bytes

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

    def _evict(self, needed: Callable[[], Needs]) -> None:
        evicted = self._index.evict(lambda: self._mapped_after(needed()) <= self._limit)
        self._counts.evictions["room"] += evicted

    def _evictable(self, group: LayerGroup) -> Counter[str]:
        """Cached blocks of a group, by page format."""
        allocator = group.allocator
        allocator.drain()
        blocks = self._index.evictable(allocator)
        return Counter([allocator.format_of(block).name for block in blocks])

    def _demote(self, needed: Callable[[], Needs]) -> None:
        """Make pages smaller until what is needed stays below the policy's watermark, or no page
        can be made smaller. Rings hold the latest tokens only, and are left alone."""
        if self._policy is None:
            return
        groups = [group for group in self._groups if group.is_open and group.window is None]
        while (mapped := self._mapped_after(needed())) > self._limit:
            pressure = mapped / self._budget.max_bytes
            demoted = [group.demote(self._policy, pressure) for group in groups]
            if not any(demoted):
                return
            self._counts.demotions.update(sum_counts(demoted))

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
            except PoolExhausted:
                group.allocator.allocation_failures += 1
                raise

    def _left_after(self, needs: Needs) -> int:
        """Bytes of the budget that remain when what is needed is free.

        Raises:
            PoolExhausted: it does not suffice; nothing was changed.
        """
        for group in needs:
            group.allocator.drain()
        left = self._budget.left
        for group, counts in needs.items():
            left = group.allocator.room_after(counts, left)
        return left
