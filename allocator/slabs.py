"""Which pages are mapped: slabs, their sizes, and the ids of the blocks that live in them.

A block's id names its place, so that a table entry is all that a kernel needs:

    block = slab * 65536 + page        (slab_of, page_of)

Slab i holds min(first * 2**i, an eighth of the budget, what the budget leaves) blocks. A slot
whose slab was given back is used again before a new one is opened.
"""

from bisect import bisect_left
from dataclasses import dataclass

from paged_kv.allocator.byte_budget import ByteBudget

PAGE_BITS = 16
MAX_SLAB_PAGES = 1 << PAGE_BITS

# A chat of 1,024 tokens commits one slab; doubling then reaches any length in a few slabs.
FIRST_SLAB_PAGES = 4
# No single allocation may take more than this share of the budget.
LARGEST_SLAB_SHARE = 8


def slab_of(block: int) -> int:
    """The slab that holds a block's pages."""
    return block >> PAGE_BITS


def page_of(block: int) -> int:
    """The place of a block's pages within their slab."""
    return block & (MAX_SLAB_PAGES - 1)


def block_range(slab: int, pages: int) -> range:
    """The ids of the blocks of a slab of `pages` pages."""
    return range(slab << PAGE_BITS, (slab << PAGE_BITS) + pages)


def count_by_slab(blocks: list[int]) -> list[tuple[int, int]]:
    """(slab, how many of the blocks it holds) of an ascending list. O(slabs log n)."""
    # Nearly always they are in one, and this is most of what a single block costs.
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
class SlabPlan:
    """A slab that could be mapped next."""

    slab: int
    pages: int


def plan_slabs(
    needed: int,
    left: int,
    taken: dict[int, int],
    budget: ByteBudget,
    block_bytes: int,
    max_pages: int,
) -> list[SlabPlan]:
    """The slabs to map, in order, until they hold `needed` blocks or `left` bytes are spent.

    `taken` maps each slab that exists to its pages; none gets more than `max_pages`. O(slabs).
    """
    plans: list[SlabPlan] = []
    eighth = budget.max_bytes // LARGEST_SLAB_SHARE // block_bytes
    largest = max(1, min(eighth, max_pages))
    slab = 0
    while needed > 0 and left >= block_bytes:
        if slab not in taken:
            doubled = FIRST_SLAB_PAGES << min(slab, PAGE_BITS)
            pages = min(doubled, largest, left // block_bytes)
            plans.append(SlabPlan(slab, pages))
            needed -= pages
            left -= pages * block_bytes
        slab += 1
    return plans
