"""Tracks the slabs of one page format, and which of their blocks are free.

A format's i-th slab holds min(first * 2**i, an eighth of the budget, the rest of the budget)
blocks. The number of an unmapped slab is reused before a new number is taken.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

from sortedcontainers import SortedList

from paged_kv.allocator.allocator_stats import FormatStats
from paged_kv.allocator.byte_budget import ByteBudget, require_positive
from paged_kv.allocator.slabs import MAX_SLAB_PAGES, PAGE_BITS, block_range, count_by_slab, slab_of

# A chat of 1,024 tokens commits one slab; doubling then reaches any length in a few slabs.
FIRST_SLAB_PAGES = 4
# No single allocation may take more than this share of the budget.
LARGEST_SLAB_SHARE = 8


@dataclass(frozen=True)
class SlabPlan:
    """A slab that could be mapped next."""

    slab: int
    pages: int


class FormatSlabs:
    """Free and used blocks of one page format; a slab never changes its format.

    Attributes:
        name: the format.
        block_bytes: bytes of one block: the pages of all layers of the group together.
        max_slab_pages: the most pages of a slab; lower it if the device limits one allocation.
        slabs: pages of each slab.
        free: free blocks, the lowest first.
        used: used and cached blocks of each slab.
        num_used: used and cached blocks of all slabs.
        num_cached: the cached ones among them, which no table holds.
        spare: blocks of empty slabs.
        last_block_slots, out_of_window_slots: see `IdleSlots`.
    """

    def __init__(self, name: str, block_bytes: int) -> None:
        require_positive("block_bytes", block_bytes)
        self.name = name
        self.block_bytes = block_bytes
        self.max_slab_pages = MAX_SLAB_PAGES
        self.slabs: dict[int, int] = {}
        self.free: SortedList[int] = SortedList()
        self.used: dict[int, int] = {}
        self.num_used = 0
        self.num_cached = 0
        self.spare = 0
        self.last_block_slots = 0
        self.out_of_window_slots = 0

    @property
    def capacity(self) -> int:
        """Blocks of all mapped slabs."""
        return sum(self.slabs.values())

    def largest_slab(self, budget: ByteBudget) -> int:
        """The most pages of a slab."""
        eighth = budget.max_bytes // LARGEST_SLAB_SHARE // self.block_bytes
        return max(1, min(eighth, self.max_slab_pages))

    def plan(
        self, needed: int, left: int, taken: Container[int], budget: ByteBudget
    ) -> list[SlabPlan]:
        """The slabs to map, in order, until they hold `needed` blocks or `left` bytes are spent.

        `taken` holds the existing slabs of all formats. O(slabs).
        """
        plans: list[SlabPlan] = []
        largest = self.largest_slab(budget)
        slab = older = 0
        while needed > 0 and left >= self.block_bytes:
            if slab not in taken:
                doubled = FIRST_SLAB_PAGES << min(older, PAGE_BITS)
                pages = min(doubled, largest, left // self.block_bytes)
                plans.append(SlabPlan(slab, pages))
                needed -= pages
                left -= pages * self.block_bytes
            if slab not in taken or slab in self.slabs:
                older += 1
            slab += 1
        return plans

    def add_slab(self, slab: int, pages: int) -> None:
        """Add a slab; all of its blocks are free."""
        self.slabs[slab] = pages
        self.used[slab] = 0
        self.spare += pages
        self.free.update(block_range(slab, pages))

    def remove_slab(self, slab: int) -> int:
        """Forget an empty slab; returns its number of pages."""
        pages = self.slabs.pop(slab)
        del self.used[slab]
        self.spare -= pages
        first = self.free.bisect_left(block_range(slab, pages).start)
        del self.free[first : first + pages]
        return pages

    def take(self, count: int) -> list[int]:
        """Mark the `count` lowest free blocks as used."""
        if count == 1:
            blocks = [self.free.pop(0)]
        else:
            blocks = list(self.free[:count])
            del self.free[:count]
        for slab, taken in count_by_slab(blocks):
            self._use(slab, taken)
        return blocks

    def take_block(self, block: int) -> None:
        """Mark this free block as used."""
        self.free.remove(block)
        self._use(slab_of(block), 1)

    def give(self, blocks: list[int]) -> list[int]:
        """Free used blocks, given in ascending order; returns the slabs that are empty now."""
        if len(blocks) == 1:
            self.free.add(blocks[0])
        else:
            self.free.update(blocks)
        emptied = []
        for slab, freed in count_by_slab(blocks):
            self.used[slab] -= freed
            if not self.used[slab]:
                self.spare += self.slabs[slab]
                emptied.append(slab)
        self.num_used -= len(blocks)
        return emptied

    def empty_slabs(self) -> list[int]:
        """The slabs of which no block is used."""
        return [slab for slab, used in self.used.items() if not used]

    def is_spare(self, slab: int) -> bool:
        """Whether an empty slab can be unmapped without being mapped again soon.

        True if at least half as many blocks are free elsewhere. Then sequences that come and go
        at the edge of a slab do not map and unmap it each time.
        """
        pages = self.slabs[slab]
        return 2 * (len(self.free) - pages) >= pages

    def slabs_to_empty(self) -> set[int]:
        """The emptiest slabs whose blocks fit into the free pages of the slabs that stay."""

        def emptiest_first(slab: int) -> tuple[float, int]:
            return self.used[slab] / self.slabs[slab], -self.slabs[slab]

        victims: set[int] = set()
        room = len(self.free)
        for slab in sorted(self.slabs, key=emptiest_first):
            # Emptying a slab costs as many free pages as the slab has pages: its own free pages
            # go, and each used page fills a free one elsewhere.
            if self.slabs[slab] <= room:
                victims.add(slab)
                room -= self.slabs[slab]
        return victims

    def stats(self, page_size: int) -> FormatStats:
        """A snapshot. O(slabs)."""
        return FormatStats(
            page_format=self.name,
            block_bytes=self.block_bytes,
            page_size=page_size,
            slabs=len(self.slabs),
            used=self.num_used - self.num_cached,
            cached=self.num_cached,
            spare=self.spare,
            fragmented=len(self.free) - self.spare,
            last_block_slots=self.last_block_slots,
            out_of_window_slots=self.out_of_window_slots,
            compactable=self.compactable,
        )

    @property
    def compactable(self) -> int:
        """Blocks of the slabs that compaction would unmap. O(slabs log slabs)."""
        # Most pools fill their slabs in order, and have fewer free blocks than any slab holds.
        if not self.slabs or len(self.free) < min(self.slabs.values()):
            return 0
        return sum(self.slabs[slab] for slab in self.slabs_to_empty())

    def check(self) -> None:
        """Verify the counts against each other."""
        assert self.num_used == sum(self.used.values()), "used blocks are miscounted"
        empty = self.empty_slabs()
        assert self.spare == sum(self.slabs[slab] for slab in empty), "spare blocks are miscounted"

    def _use(self, slab: int, count: int) -> None:
        if not self.used[slab]:
            self.spare -= self.slabs[slab]
        self.used[slab] += count
        self.num_used += count


def by_format(
    blocks: list[int], slab_format: Mapping[int, FormatSlabs]
) -> dict[FormatSlabs, list[int]]:
    """Split ascending blocks by the format of their slabs."""
    parts: dict[FormatSlabs, list[int]] = {}
    start = 0
    for slab, count in count_by_slab(blocks):
        parts.setdefault(slab_format[slab], []).extend(blocks[start : start + count])
        start += count
    return parts
