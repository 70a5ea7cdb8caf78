"""Tracks the slabs of one page format, and which of their blocks are free.

A block's id is its location, so a kernel needs nothing but the table entry:

    block = slab * 65536 + page        (slab_of)

A slab is as large as the step that needs it, and at least a 64th of what its format holds. The
number of an unmapped slab is reused before a new number is taken.

A rewrite moves the used pages of some slabs and unmaps these slabs. The pages move into free pages
of the slabs that stay, and where those do not suffice into a new slab. A rewrite gives back free
pages, or joins small slabs when there are as many as a kernel takes. Pages move layer by layer, so
that one layer's pages exist twice at a time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sortedcontainers import SortedList

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
# The share of the used pages that a step may copy to give back others, and the number of pages that
# it may copy in any case.
COPIED_SHARE = 16
COPIED_PAGES = SMALL_SLAB_PAGES


@dataclass(eq=False, repr=False)
class FormatSlabs:
    """Free and used blocks of one page format; a slab never changes its format."""

    name: str
    block_bytes: int  # bytes of one block: the pages of all layers of the group together
    page_bytes: int = field(init=False)  # bytes of a block's largest page: layers move in turn
    # The most pages of a slab; lower it if the device limits one allocation.
    max_slab_pages: int = field(default=MAX_SLAB_PAGES, init=False)
    slabs: dict[int, int] = field(default_factory=dict, init=False)  # pages of each
    free: SortedList[int] = field(default_factory=SortedList, init=False)  # the lowest first
    used: dict[int, int] = field(default_factory=dict, init=False)  # of each slab, with cached ones
    num_cached: int = field(default=0, init=False)  # used ones that no table holds
    # Steps that ended with an empty slab since a block was last allocated.
    idle_steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        require_positive("block_bytes", self.block_bytes)
        self.page_bytes = self.block_bytes

    @property
    def capacity(self) -> int:
        """Blocks of all mapped slabs. O(slabs), as the next two."""
        return sum(self.slabs.values())

    @property
    def num_used(self) -> int:
        """Used and cached blocks of all slabs."""
        return sum(self.used.values())

    @property
    def spare(self) -> int:
        """Blocks of empty slabs."""
        return self.pages_of(self.empty_slabs())

    @property
    def reserve(self) -> int:
        """Free blocks that are kept for later steps; none if no block is used."""
        return max(1, self.num_used // RESERVE_SHARE) if self.num_used else 0

    def missing(self, needed: int) -> int:
        """Blocks to map so that so many are free."""
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
        self.free.update(block_range(slab, pages))

    def remove_slab(self, slab: int) -> int:
        """Forget an empty slab; returns its number of pages."""
        pages = self.slabs.pop(slab)
        del self.used[slab]
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
                emptied.append(slab)
        return emptied

    def empty_slabs(self) -> list[int]:
        return [slab for slab, used in self.used.items() if not used]

    def pages_of(self, slabs: Iterable[int]) -> int:
        return sum(self.slabs[slab] for slab in slabs)

    def used_of(self, slabs: Iterable[int]) -> int:
        """Used and cached blocks of some slabs."""
        return sum(self.used[slab] for slab in slabs)

    def _use(self, slab: int, count: int) -> None:
        self.used[slab] += count
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


@dataclass(frozen=True)
class Rewrite:
    """A rewrite of slabs of one format."""

    slabs: FormatSlabs
    emptied: tuple[int, ...]  # the slabs whose pages move, and which are then unmapped
    new_pages: int  # of the new slab; 0 if there is none

    @property
    def freed(self) -> int:
        """Pages that fewer are mapped afterwards; negative if more are."""
        return self.slabs.pages_of(self.emptied) - self.new_pages

    @property
    def copied(self) -> int:
        """Pages that move."""
        return self.slabs.used_of(self.emptied)

    @property
    def cost(self) -> float:
        """Bytes that are copied for each slab that a kernel takes less. A slab that grows takes the
        place of another one."""
        kept = 1 if self.freed >= 0 else 0
        return self.copied * self.slabs.block_bytes / (len(self.emptied) - kept)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are mapped at a time, beyond those mapped before."""
        grown = max(0, -self.freed)
        return grown * self.slabs.block_bytes + (self.new_pages - grown) * self.slabs.page_bytes


def giving_back(slabs: FormatSlabs, keep: int, most: float, left: int) -> Rewrite | None:
    """A rewrite of the emptiest slabs that leaves no fewer than `keep` blocks free, or None.

    It copies at most `most` pages, unless the emptiest slab has more, and maps at most `left` bytes
    at a time beyond those that are mapped. O(slabs log slabs).
    """
    excess = len(slabs.free) - keep
    if excess <= 0:
        return None
    emptiest_first = sorted(
        slabs.slabs, key=lambda slab: (slabs.used[slab] / slabs.slabs[slab], slabs.slabs[slab])
    )
    emptied: list[int] = []
    for slab in emptiest_first:
        if slabs.pages_of(emptied) >= excess:
            break
        if emptied and slabs.used_of([*emptied, slab]) > most:
            break
        emptied.append(slab)
    rewrite = _emptying(slabs, emptied, excess)
    if rewrite.new_pages <= slabs.max_slab_pages and rewrite.peak_bytes <= left:
        return rewrite
    # Without a new slab, whose pages would exist twice.
    fitting: list[int] = []
    for slab in emptiest_first:
        if slabs.pages_of([*fitting, slab]) <= excess:
            fitting.append(slab)
    return _emptying(slabs, fitting, excess) if fitting else None


def bounded(used: int) -> int:
    """The number of pages that a step may copy to give back others, if so many are used."""
    return max(COPIED_PAGES, used // COPIED_SHARE)


def compacting(slabs: FormatSlabs, left: int) -> Rewrite | None:
    """A rewrite that gives back all free pages, or as many as `left` bytes allow."""
    return giving_back(slabs, 0, math.inf, left)


def joining(formats: Iterable[FormatSlabs], budget: ByteBudget) -> Rewrite | None:
    """Of the rewrites of a format's smallest slabs into one, the cheapest; None if all would be too
    large."""
    rewrites = [merged(slabs, 2, 0, budget) for slabs in formats]
    return min(filter(None, rewrites), key=lambda each: each.cost, default=None)


def merged(slabs: FormatSlabs, fewest: int, more: int, budget: ByteBudget) -> Rewrite | None:
    """A rewrite of the `fewest` smallest slabs into one with `more` free pages, and of further ones
    as long as it copies no more pages than a step may; None if it would be too large."""
    smallest_first = sorted(slabs.slabs, key=lambda slab: (slabs.slabs[slab], slabs.used[slab]))
    best = None
    for count in range(fewest, len(smallest_first) + 1):
        emptied = tuple(smallest_first[:count])
        rewrite = Rewrite(slabs, emptied, slabs.pages_of(emptied) + more)
        fits = rewrite.new_pages <= slabs.largest_slab(budget) and rewrite.peak_bytes <= budget.left
        if not fits or (best and rewrite.copied > bounded(slabs.num_used)):
            break
        best = rewrite
    return best


def _emptying(slabs: FormatSlabs, emptied: list[int], excess: int) -> Rewrite:
    return Rewrite(slabs, tuple(emptied), max(0, slabs.pages_of(emptied) - excess))
