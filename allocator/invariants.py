"""Verifies every invariant of an allocator against its block tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paged_kv.allocator.slabs import block_range, slab_of

if TYPE_CHECKING:
    from paged_kv.allocator.block_allocator import BlockAllocator


def check_invariants(allocator: BlockAllocator) -> None:
    """Raise an AssertionError that names the first broken invariant. O(n log n)."""
    refs, formats = allocator.refs, allocator.formats
    free = [block for slabs in formats for block in slabs.free]
    used = refs.counts
    pages = allocator.slabs.items()
    mapped = {block for slab, number in pages for block in block_range(slab, number)}
    assert len(free) == len(set(free)), "a block is free twice"
    assert not used.keys() & set(free), "a block is free and used"
    assert used.keys() | set(free) == mapped, "a block is lost, or lies outside every slab"
    refs.check(block for table in allocator.tables for block in table.blocks)
    in_slab = Counter(map(slab_of, used))
    for slabs in formats:
        assert slabs.used == {slab: in_slab[slab] for slab in slabs.slabs}, "a count is wrong"
        of_first = [allocator.format_of(block_range(slab, 1)[0]) for slab in slabs.slabs]
        assert all(each is slabs for each in of_first)
        slabs.check()
    cached = Counter(allocator.format_of(each).name for each in refs.kept if refs.is_cached(each))
    counted = Counter({each.name: each.num_cached for each in formats})
    assert cached == counted, "cached blocks are miscounted"
    allocator.idle_slots.check(allocator.tables, formats)
    bytes_mapped = sum(each.capacity * each.block_bytes for each in formats)
    assert bytes_mapped <= allocator.budget.mapped <= allocator.budget.max_bytes
