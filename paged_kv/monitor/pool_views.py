"""Makes views of pools."""

from __future__ import annotations

import heapq
import os
import sys
import time
from collections.abc import Iterable
from operator import add

from paged_kv.allocator.block_map import block_map
from paged_kv.monitor.process_view import PoolView, ProcessView, SequenceView
from paged_kv.pool.page_pool import PagePool

LARGEST_SEQUENCES = 10
LONGEST_COMMAND = 200


def view_process(pools: Iterable[PagePool], patience_s: float = 1.0) -> ProcessView:
    """A view of the pools of this process, without those that stay locked for `patience_s`
    seconds."""
    pools = sorted(pools, key=lambda pool: pool.serial)
    views = [view_pool(pool, patience_s) for pool in pools]
    there = tuple([view for view in views if view is not None])
    command = " ".join(" ".join(sys.orig_argv).split())[:LONGEST_COMMAND]
    ranks = {rank: memory for pool in pools for rank, memory in pool.ranks.memory.items()}
    return ProcessView(os.getpid(), command, time.time(), there, tuple(sorted(ranks.items())))


def view_pool(pool: PagePool, patience_s: float = 1.0) -> PoolView | None:
    """A view of a pool; None if it stays locked for `patience_s` seconds. The pool is locked only
    while references are copied."""
    if not pool.lock.acquire(timeout=patience_s):
        return None
    try:
        stats = pool.snapshot()
        allocators = [group.allocator for group in pool.groups if group.is_open]
        maps = [block_map(allocator) for allocator in allocators]
        sequences = _largest_sequences(pool)
    finally:
        pool.lock.release()
    slabs = tuple([(group, slab) for group, states in enumerate(maps) for slab in states()])
    return PoolView(pool.name, pool.serial, stats, slabs, sequences)


def _largest_sequences(pool: PagePool) -> tuple[SequenceView, ...]:
    views: dict[str, SequenceView] = {}
    for group in pool.groups:
        tables = list(group.allocator.tables) if group.is_open else []
        tables = [table for table in tables if not table.is_scratch]
        for table in heapq.nlargest(LARGEST_SEQUENCES, tables, key=lambda each: len(each.blocks)):
            allocator = table.allocator
            shared = sum(allocator.refs.holders(block) > 1 for block in table.blocks)
            nbytes = sum(allocator.format_of(block).block_bytes for block in table.blocks)
            name, tokens, *sums = views.get(table.owner, (table.owner[:8], 0, 0, 0, 0))
            counts = map(add, sums, (len(table.blocks), shared, nbytes))
            views[table.owner] = SequenceView(name, max(tokens, table.tokens), *counts)
    largest = heapq.nlargest(LARGEST_SEQUENCES, views.values(), key=lambda each: each.nbytes)
    return tuple(largest)
