"""Plans rewrites: the used pages of some slabs move out of them, and these slabs are unmapped.

The pages move into free pages of the slabs that stay, and where those do not suffice into a new
slab. A rewrite gives back free pages, or joins small slabs when there are as many as a kernel
takes. Pages move layer by layer, so that one layer's pages exist twice at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.slabs import SMALL_SLAB_PAGES, FormatSlabs

# The share of the used pages that a step may copy to give back others, and the number of pages that
# it may copy in any case.
COPIED_SHARE = 16
COPIED_PAGES = SMALL_SLAB_PAGES


@dataclass(frozen=True)
class Rewrite:
    """A rewrite of slabs of one format.

    Attributes:
        slabs: the format.
        emptied: the slabs whose pages move, and which are then unmapped.
        new_pages: pages of the new slab; 0 if there is none.
    """

    slabs: FormatSlabs
    emptied: tuple[int, ...]
    new_pages: int

    @property
    def freed(self) -> int:
        """Pages that fewer are mapped afterwards; negative if more are."""
        return self.slabs.pages_of(self.emptied) - self.new_pages

    @property
    def copied(self) -> int:
        """Pages that move."""
        return self.slabs.used_of(self.emptied)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the pages that move."""
        return self.copied * self.slabs.block_bytes

    @property
    def cost(self) -> float:
        """Bytes that are copied for each slab that a kernel takes less. A slab that grows takes the
        place of another one."""
        kept = 1 if self.freed >= 0 else 0
        return self.copied_bytes / (len(self.emptied) - kept)

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


def tidying(slabs: FormatSlabs, left: int) -> Rewrite | None:
    """A rewrite that gives back free pages beyond the format's reserve, and copies few pages."""
    return giving_back(slabs, slabs.reserve, bounded(slabs.num_used), left)


def compacting(slabs: FormatSlabs, left: int) -> Rewrite | None:
    """A rewrite that gives back all free pages, or as many as `left` bytes allow."""
    return giving_back(slabs, 0, math.inf, left)


def growing(slabs: FormatSlabs, pages: int, budget: ByteBudget) -> Rewrite | None:
    """A rewrite of the smallest slabs into one with `pages` more; None if that is too large."""
    return _merged(slabs, 1, pages, budget)


def joining(formats: Iterable[FormatSlabs], budget: ByteBudget) -> Rewrite | None:
    """Of the rewrites of a format's smallest slabs into one, the cheapest; None if all would be too
    large."""
    merged = [_merged(slabs, 2, 0, budget) for slabs in formats]
    return min(filter(None, merged), key=lambda each: each.cost, default=None)


def _merged(slabs: FormatSlabs, fewest: int, more: int, budget: ByteBudget) -> Rewrite | None:
    """A rewrite of so many of the smallest slabs into one, and of further ones as long as it copies
    no more pages than a step may."""
    smallest_first = sorted(slabs.slabs, key=lambda slab: (slabs.slabs[slab], slabs.used[slab]))
    merged = None
    for count in range(fewest, len(smallest_first) + 1):
        emptied = tuple(smallest_first[:count])
        rewrite = Rewrite(slabs, emptied, slabs.pages_of(emptied) + more)
        fits = rewrite.new_pages <= slabs.largest_slab(budget) and rewrite.peak_bytes <= budget.left
        if not fits or (merged and rewrite.copied > bounded(slabs.num_used)):
            break
        merged = rewrite
    return merged


def _emptying(slabs: FormatSlabs, emptied: list[int], excess: int) -> Rewrite:
    return Rewrite(slabs, tuple(emptied), max(0, slabs.pages_of(emptied) - excess))
