"""Copies an allocator without its memory, so that a plan can be tried on the copy."""

from collections.abc import Container

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.format_slabs import SlabPlan


def copy_of(
    allocator: BlockAllocator, budget: ByteBudget, unwanted: Container[int]
) -> BlockAllocator:
    """A copy with the same slabs, tables and used blocks. `budget` counts the copy's slabs. The
    `unwanted` blocks, which no table may hold, are free in it. O(slabs + table entries)."""
    first, *others = allocator.formats
    copy = BlockAllocator(budget, first.block_bytes, allocator.page_size, page_format=first.name)
    for theirs in (first, *others):
        slabs = copy.add_format(theirs.name, theirs.block_bytes)
        slabs.max_slab_pages = theirs.max_slab_pages
        for slab, pages in theirs.slabs.items():
            copy.map(slabs, SlabPlan(slab, pages))
    for block in allocator.refs.counts:
        if block not in unwanted:
            copy.format_of(block).take_block(block)
    copy.refs.begin([block for block in allocator.refs.kept if block not in unwanted])
    for table in allocator.tables:
        twin = copy.new_table(table.ring, table.page_format)
        first_held = [block for block in table.blocks if not copy.ref_count(block)]
        copy.retain([block for block in table.blocks if copy.ref_count(block)])
        copy.refs.begin(first_held)
        twin.change(table.blocks, table.tokens)
        twin.last_reserved = table.last_reserved
    copy.tokens_reserved = allocator.tokens_reserved
    return copy
