"""Describes a pool's memory in integers, for admission."""

from __future__ import annotations

from paged_kv.admission.pool_size import GroupSize, PoolSize
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_group import WRITTEN_BLOCKS, LayerGroup
from paged_kv.pool.page_pool import PagePool


def pool_size(pool: PagePool) -> PoolSize:
    """The memory that a pool can promise, once it knows its layers' geometry. With "auto" pages
    promises count 16 bits: requantisation makes room for cached pages, never for a promise."""
    groups = [_group_size(group) for group in pool.groups if group.is_open]
    slack = pool.reclaimer.slack(pool.budget)
    return PoolSize(pool.budget.max_bytes, slack, tuple(groups), PAGE_SIZE)


def _group_size(group: LayerGroup) -> GroupSize:
    return GroupSize(
        group.block_bytes,
        group.blocks_for,
        is_ring=group.window is not None,
        written_bytes=group.written_block_bytes,
        written_blocks=WRITTEN_BLOCKS if group.recodes else 0,
        first_bytes=group.first_block_bytes,
        kept_blocks=group.kept_blocks,
        left_bytes=group.offloaded_block_bytes,
    )


def shares(max_bytes: int, pools: list[PagePool]) -> list[int]:
    """Divides bytes among pools that will hold the same tokens: in proportion to a token's bytes.
    The pools must know their layers' geometry."""
    sizes = [sum(group.block_bytes for group in pool_size(pool).groups) for pool in pools]
    return [max(1, max_bytes * size // max(1, sum(sizes))) for size in sizes]
