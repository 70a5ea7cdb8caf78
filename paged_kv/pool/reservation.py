"""Reserves blocks for writes before any layer writes, for real or in a dry run."""

from __future__ import annotations

from collections.abc import Container, Mapping

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlocks
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.writes import Write, blocks_needed, reserve_all
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageFormat
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.reclaimer import Reclaimer
from paged_kv.pool.stats import PoolCounts

Writes = Mapping[LayerGroup, list[Write]]


def needs_of(writes: Writes) -> dict[LayerGroup, Mapping[str, int]]:
    """Blocks to allocate in each group, by page format."""
    return {group: blocks_needed(theirs) for group, theirs in writes.items()}


def reserve_together(reclaimer: Reclaimer, writes: Writes) -> None:
    """Reserve blocks for all writes, and copy shared pages before a table refers to the copies.

    Raises:
        PoolExhausted: the budget does not hold them; no table has changed.
        BaseException: what copying raises, such as a `ThreadConflict`; no table has changed.
    """
    if not all(each.is_owned for theirs in writes.values() for each in theirs):
        reclaimer.make_room(lambda: needs_of(writes))
    reserve_all([(theirs, group.copy_pages) for group, theirs in writes.items()])


def reserve_by_page(reclaimer: Reclaimer, writes: Writes) -> None:
    """Reserve blocks for all writes a page at a time, so that the first pages of a step can be
    requantised for its last ones.

    Raises:
        PoolExhausted: the budget does not hold them all; tables may have reserved the first.
    """
    by_page = {group: [write.by_page() for write in theirs] for group, theirs in writes.items()}
    rounds = max([len(pages) for theirs in by_page.values() for pages in theirs], default=0)
    for at in range(rounds):
        reserve_together(
            reclaimer,
            {
                group: [pages[at] for pages in theirs if at < len(pages)]
                for group, theirs in by_page.items()
            },
        )


def dry_run(reclaimer: Reclaimer, page_format: PageFormat, tokens: int) -> bool:
    """Whether a new sequence of `tokens` tokens could be written now, in steps of any size: reserve
    its blocks in copies of the allocators.

    If pages are requantised while a sequence is written, the answer depends on how slabs of several
    formats fill the budget. No formula gives that exactly, so the dry run makes the real steps.

    O(pages of the sequence * table entries).
    """
    budget = reclaimer.budget
    mapped = sum(each.capacity * each.block_bytes for each in reclaimer.formats())
    free = ByteBudget(budget.max_bytes, budget.mapped - mapped)
    copies = [
        group.with_allocator(_copy_of(group.allocator, free, reclaimer.evictable(group)))
        for group in reclaimer.open_groups()
    ]
    index = PrefixIndex(PAGE_SIZE, free.lock)
    copy = Reclaimer(copies, free, index, OutOfWindowBlocks(), reclaimer.policy, PoolCounts())
    writes = {group: [Write(group.new_table(page_format), 0, tokens)] for group in copies}
    try:
        reserve_by_page(copy, writes)
    except PoolExhausted:
        return False
    return True


def _copy_of(
    allocator: BlockAllocator, budget: ByteBudget, unwanted: Container[int]
) -> BlockAllocator:
    """A copy with the same slabs, tables and used blocks. `budget` counts the copy's slabs. The
    `unwanted` blocks, which no table may hold, are free in it. O(slabs + table entries)."""
    first, *others = allocator.formats
    copy = BlockAllocator(
        budget,
        first.block_bytes,
        allocator.page_size,
        page_format=first.name,
        max_slabs=allocator.max_slabs,
    )
    for theirs in (first, *others):
        slabs = copy.add_format(theirs.name, theirs.block_bytes)
        slabs.max_slab_pages, slabs.page_bytes = theirs.max_slab_pages, theirs.page_bytes
        for slab, pages in theirs.slabs.items():
            copy.map(slabs, slab, pages)
    for block in allocator.refs.counts:
        if block not in unwanted:
            copy.format_of(block).take_block(block)
    copy.refs.begin([block for block in allocator.refs.kept if block not in unwanted])
    for table in allocator.tables:
        twin = copy.new_table(table.ring, table.page_format, table.first_format)
        first_held = [block for block in table.blocks if not copy.ref_count(block)]
        copy.retain([block for block in table.blocks if copy.ref_count(block)])
        copy.refs.begin(first_held)
        twin.change(table.blocks, table.tokens)
        twin.last_reserved = table.last_reserved
    copy.tokens_reserved = allocator.tokens_reserved
    return copy
