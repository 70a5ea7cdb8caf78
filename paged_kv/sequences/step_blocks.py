"""Reserves the blocks of a step before any layer writes."""

from __future__ import annotations

from collections import Counter

from paged_kv.allocator.block_table import BlockTable, Write
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.kernels.pages.errors import ThreadConflict
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.pool.reservation import Writes, needs_of, own, own_by_page
from paged_kv.sequences.full_pages import SequenceWrite, recode_full_pages
from paged_kv.sequences.out_of_window_pages import cache_leaving
from paged_kv.sequences.sequence import Sequence
from paged_kv.sequences.step_row import StepRow

Scratch = dict[LayerGroup, dict[Sequence, BlockTable]]
"""One block for each sequence whose step begins within a page and leaves it: see
`Write.needs_scratch`."""


def reserve(pool: PagePool, rows: list[StepRow]) -> Scratch:
    """Own blocks in all groups for the tokens of a step; returns those beside the block tables,
    which the caller drops after the step.

    Writing does so by itself. A model that is asked for masks first can be stopped here,
    before any of its layers has changed anything.

    Before that, full pages are recoded to the format of their sequence.

    Raises:
        PoolExhausted: the budget does not hold the blocks. No sequence has changed, but full pages
            may be recoded already.
    """
    with pool.lock:
        step_writes = _writes_of(pool, rows)
        unreserved = [each for each in step_writes if not each.write.is_reserved]
        recode_full_pages(pool.reclaimer, unreserved)
        _cache_leaving(pool, unreserved)
        scratch = _scratch_of(pool, step_writes)
        try:
            _own(pool, _by_group(unreserved), rows)
        except (PoolExhausted, ThreadConflict):
            drop(scratch)
            raise
        return scratch


def drop(scratch: Scratch) -> None:
    """Release the blocks, at the next call of their allocators."""
    for tables in scratch.values():
        for table in tables.values():
            table.allocator.drop_later(table)
    scratch.clear()


def _own(pool: PagePool, writes: Writes, rows: list[StepRow]) -> None:
    if pool.requantisation_policy is None or pool.reclaimer.has(needs_of(writes)):
        own(pool.reclaimer, writes)
        return
    try:
        own_by_page(pool.reclaimer, writes)
    except (PoolExhausted, ThreadConflict):
        for row in rows:
            row.sequence.shrink()
        raise


def _writes_of(pool: PagePool, rows: list[StepRow]) -> list[SequenceWrite]:
    open_groups = [group for group in pool.groups if group.is_open]
    return [
        SequenceWrite(group, sequence, Write(sequence.table(group), start, end))
        for sequence, start, end, *_ in rows
        for group in open_groups
        if end > start
    ]


def _scratch_of(pool: PagePool, step_writes: list[SequenceWrite]) -> Scratch:
    needs: dict[LayerGroup, Counter[str]] = {}
    for group, _, write in step_writes:
        if write.needs_scratch:
            needs.setdefault(group, Counter())[write.table.page_format] += 1
    scratch: Scratch = {}
    if needs:
        pool.reclaimer.make_room(lambda: needs)
    for group, sequence, write in step_writes:
        if write.needs_scratch:
            table = group.allocator.new_scratch(write.table.page_format)
            scratch.setdefault(group, {})[sequence] = table
    return scratch


def _cache_leaving(pool: PagePool, step_writes: list[SequenceWrite]) -> None:
    """Cache the pages of rings that these writes overwrite, if other sequences may reuse them. They
    are shared from then on, so that a write needs one more block."""
    for group, sequence, write in step_writes:
        cache_leaving(pool.out_of_window, group, sequence, write.end)


def _by_group(step_writes: list[SequenceWrite]) -> Writes:
    writes: dict[LayerGroup, list[Write]] = {}
    for group, _, write in step_writes:
        writes.setdefault(group, []).append(write)
    return writes
