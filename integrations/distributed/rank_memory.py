"""The memory of this rank's pools, as the other ranks show it."""

from __future__ import annotations

from paged_kv.pool.page_pool import open_pools
from paged_kv.ranks import RankMemory

# The thread that asks must not wait for a pool that a hanging rank has locked.
PATIENCE_S = 0.05


def own_memory(before: RankMemory) -> RankMemory:
    """The memory of this process's pools; `before` if one of them is locked."""
    stats = []
    for pool in open_pools.items():
        if not pool.lock.acquire(timeout=PATIENCE_S):
            return before
        try:
            stats.append(pool.snapshot())
        finally:
            pool.lock.release()
    return RankMemory(
        sum(each.bytes_budget for each in stats),
        sum(each.bytes_mapped for each in stats),
        sum(each.bytes_active for each in stats),
    )
