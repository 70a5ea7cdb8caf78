"""Reserves the blocks of a step before any layer writes."""

from __future__ import annotations

from typing import NamedTuple

from paged_kv.allocator.block_table import Write
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.kernels.pages.errors import ThreadConflict
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.pool.reservation import Writes, needs_of, own, own_by_page
from paged_kv.sequences.out_of_window_pages import cache_leaving
from paged_kv.sequences.sequence import Sequence
from paged_kv.sequences.step_row import StepRow


def reserve(pool: PagePool, rows: list[StepRow]) -> None:
    """Own blocks in all groups for the tokens of a step.

    Writing does so by itself. A model that is asked for masks first can be stopped here,
    before any of its layers has changed anything.

    Raises:
        PoolExhausted: the budget does not hold the blocks; no sequence has changed.
    """
    with pool.lock:
        step_writes = _unreserved(pool, rows)
        _cache_leaving(pool, step_writes)
        writes = _by_group(step_writes)
        if pool.requantisation_policy is None or pool.reclaimer.has(needs_of(writes)):
            own(pool.reclaimer, writes)
            return
        try:
            own_by_page(pool.reclaimer, writes)
        except (PoolExhausted, ThreadConflict):
            for row in rows:
                row.sequence.shrink()
            raise


class _StepWrite(NamedTuple):
    group: LayerGroup
    sequence: Sequence
    write: Write


def _unreserved(pool: PagePool, rows: list[StepRow]) -> list[_StepWrite]:
    """The writes of a step that are not reserved yet."""
    writes: list[_StepWrite] = []
    open_groups = [group for group in pool.groups if group.is_open]
    for sequence, start, end, *_ in rows:
        for group in open_groups:
            table = sequence.table(group)
            if end > start and not table.is_reserved(end):
                writes.append(_StepWrite(group, sequence, Write(table, start, end)))
    return writes


def _cache_leaving(pool: PagePool, step_writes: list[_StepWrite]) -> None:
    """Cache the pages of rings that these writes overwrite, if other sequences may reuse them. They
    are shared from then on, so that a write needs one more block."""
    for group, sequence, write in step_writes:
        cache_leaving(pool.out_of_window, group, sequence, write.end)


def _by_group(step_writes: list[_StepWrite]) -> Writes:
    writes: dict[LayerGroup, list[Write]] = {}
    for group, _, write in step_writes:
        writes.setdefault(group, []).append(write)
    return writes
