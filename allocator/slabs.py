"""Tracks the slabs of one page format, and which of their blocks are free.

A block's id is its location, so a kernel needs nothing but the table entry:

    block = slab * 65536 + page        (slab_of, page_of)

A slab is as large as the step that needs it, and at least a 64th of what its format holds. The
number of an unmapped slab is reused before a new number is taken.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from sortedcontainers import SortedList

from paged_kv.allocator.allocator_stats import FormatStats
from paged_kv.allocator.byte_budget import ByteBudget, require_positive

PAGE_BITS = 16
MAX_SLAB_PAGES = 1 << PAGE_BITS
# Slabs grow a format by at least this share of its pages, so that rewrites copy few. Growth page by
# page to 128 pages leaves none free, and copies 1.0 for each page that is written; to 2,000 pages
# 3.6. With a sixteenth it copies 0.5 and 0.6, but 6 % may be free.
GROWTH_SHARE = 64
# Free pages beyond this share of the used ones are given back. More than what growth maps ahead:
# otherwise sequences that come and go would map and unmap slabs all the time.
RESERVE_SHARE = 8
# Steps after which an empty slab that none has needed is given back. Drafts that reach over the end
# of a page need one at nearly every step; a sequence that has filled a page does not, and its empty
# slab may hold as much as it does.
IDLE_STEPS = 64
# Growth maps no slab with more than this share of its format's pages, or of the budget, so that it
# can be emptied at little cost; up to SMALL_SLAB_PAGES it may.
LARGEST_SLAB_SHARE = 8
SMALL_SLAB_PAGES = 8


class FormatSlabs:
    """Free and used blocks of one page format; a slab never changes its format.

    Attributes:
        name: the format.
        block_bytes: bytes of one block: the pages of all layers of the group together.
        page_bytes: bytes of a block's largest page: pages move layer by layer.
        max_slab_pages: the most pages of a slab; lower it if the device limits one allocation.
        slabs: pages of each slab.
        free: free blocks, the lowest first.
        used: used and cached blocks of each slab.
        num_used: used and cached blocks of all slabs.
        num_cached: the cached ones among them, which no table holds.
        spare: blocks of empty slabs.
        idle_steps: steps that ended with an empty slab since a block was last allocated.
    """

    def __init__(self, name: str, block_bytes: int) -> None:
        require_positive("block_bytes", block_bytes)
        self.name = name
        self.block_bytes = block_bytes
        self.page_bytes = block_bytes
        self.max_slab_pages = MAX_SLAB_PAGES
        self.slabs: dict[int, int] = {}
        self.free: SortedList[int] = SortedList()
        self.used: dict[int, int] = {}
        self.num_used = 0
        self.num_cached = 0
        self.spare = 0
        self.idle_steps = 0

    @property
    def capacity(self) -> int:
        """Blocks of all mapped slabs."""
        return self.num_used + len(self.free)

    @property
    def reserve(self) -> int:
        """Free blocks that are kept for later steps; none if no block is used."""
        return max(1, self.num_used // RESERVE_SHARE) if self.num_used else 0

    def missing(self, needed: int) -> int:
        """Blocks to map so that `needed` are free."""
        return max(0, needed - len(self.free))

    def largest_slab(self, budget: ByteBudget) -> int:
        """The most pages of a slab, whatever the format holds."""
        share = budget.max_bytes // LARGEST_SLAB_SHARE // self.block_bytes
        return max(1, min(share, self.max_slab_pages))

    def growth(self, missing: int, spare_bytes: int, budget: ByteBudget) -> list[int]:
        """Pages of the slabs to map, so that at least `missing` blocks more are free. Up to
        `spare_bytes` are mapped beyond those."""
        ahead = self.capacity // GROWTH_SHARE - missing
        pages = missing + max(0, min(ahead, spare_bytes // self.block_bytes))
        share = max(SMALL_SLAB_PAGES, -(-(self.capacity + pages) // LARGEST_SLAB_SHARE))
        slabs = -(-pages // min(share, self.largest_slab(budget)))
        return [(pages + at) // slabs for at in range(slabs)]

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

    def pages_of(self, slabs: Iterable[int]) -> int:
        """Pages of some slabs."""
        return sum(self.slabs[slab] for slab in slabs)

    def used_of(self, slabs: Iterable[int]) -> int:
        """Used and cached blocks of some slabs."""
        return sum(self.used[slab] for slab in slabs)

    def stats(
        self, page_size: int, last_block_slots: int, out_of_window_slots: int, compactable: int
    ) -> FormatStats:
        """A snapshot. O(1)."""
        return FormatStats(
            page_format=self.name,
            block_bytes=self.block_bytes,
            page_size=page_size,
            slabs=len(self.slabs),
            used=self.num_used - self.num_cached,
            cached=self.num_cached,
            spare=self.spare,
            fragmented=len(self.free) - self.spare,
            last_block_slots=last_block_slots,
            out_of_window_slots=out_of_window_slots,
            compactable=compactable,
        )

    def check(self) -> None:
        """Verify the counts against each other."""
        assert self.num_used == sum(self.used.values()), "used blocks are miscounted"
        assert self.capacity == sum(self.slabs.values()), "blocks are miscounted"
        empty = self.empty_slabs()
        assert self.spare == self.pages_of(empty), "spare blocks are miscounted"

    def _use(self, slab: int, count: int) -> None:
        if not self.used[slab]:
            self.spare -= self.slabs[slab]
        self.used[slab] += count
        self.num_used += count
        self.idle_steps = 0


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


def slab_of(block: int) -> int:
    """The slab that holds a block's pages."""
    return block >> PAGE_BITS


def page_of(block: int) -> int:
    """The index of a block's page within its slab."""
    return block & (MAX_SLAB_PAGES - 1)


def block_range(slab: int, pages: int) -> range:
    """The ids of the blocks of a slab of `pages` pages."""
    return range(slab << PAGE_BITS, (slab << PAGE_BITS) + pages)


def count_by_slab(blocks: list[int]) -> list[tuple[int, int]]:
    """(slab, number of these blocks in it), for an ascending list of blocks. O(slabs log n)."""
    # The blocks are nearly always in one slab, and this is most of the cost of a single block.
    if blocks and slab_of(blocks[0]) == slab_of(blocks[-1]):
        return [(slab_of(blocks[0]), len(blocks))]
    counts = []
    start = 0
    while start < len(blocks):
        slab = slab_of(blocks[start])
        end = bisect_left(blocks, (slab + 1) << PAGE_BITS, start)
        counts.append((slab, end - start))
        start = end
    return counts
