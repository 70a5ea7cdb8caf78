"""Encodes block ids: an id is a location, so a kernel needs nothing but the table entry.

block = slab * 65536 + page        (slab_of, page_of)
"""

from bisect import bisect_left

PAGE_BITS = 16
MAX_SLAB_PAGES = 1 << PAGE_BITS


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
