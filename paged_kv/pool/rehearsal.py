"""Tries in copies of the allocators whether a sequence would fit.

If pages are requantised while a sequence is written, the answer depends on how slabs of several
formats fill the budget. No formula gives that exactly, so the rehearsal makes the real steps.
"""

from __future__ import annotations

from collections.abc import Callable

from paged_kv.allocator.allocator_copy import copy_of
from paged_kv.allocator.block_table import Write
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.events import NO_EVENTS
from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlocks
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.requantisation import RequantisationPolicy
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageFormat
from paged_kv.pool.counts import PoolCounts
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.reclaimer import Reclaimer
from paged_kv.pool.reservation import own_by_page


def would_fit(
    groups: list[LayerGroup],
    budget: ByteBudget,
    evictable: Callable[[LayerGroup], set[int]],
    policy: RequantisationPolicy,
    page_format: PageFormat,
    tokens: int,
) -> bool:
    """Whether a new sequence of `tokens` tokens could be written now, in steps of any size.
    `evictable` gives the blocks of a group that could be evicted.

    O(pages of the sequence * table entries).
    """
    mapped = sum(each.capacity * each.block_bytes for g in groups for each in g.allocator.formats)
    free = ByteBudget(budget.max_bytes, budget.mapped - mapped)
    copies = [
        group.rehearsing(copy_of(group.allocator, free, evictable(group))) for group in groups
    ]
    index, counts = PrefixIndex(PAGE_SIZE, free.lock), PoolCounts(NO_EVENTS)
    reclaimer = Reclaimer(copies, free, index, OutOfWindowBlocks(), policy, counts)
    writes = {group: [Write(group.new_table(page_format), 0, tokens)] for group in copies}
    try:
        own_by_page(reclaimer, writes)
    except PoolExhausted:
        return False
    return True
