"""Reserves the blocks of a step before any layer writes."""

from __future__ import annotations

from collections import Counter

from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.writes import Write
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.pool.reservation import Writes, needs_of, reserve_by_page, reserve_together
from paged_kv.steps.full_pages import SequenceWrite, recode_full_pages
from paged_kv.steps.out_of_window_pages import cache_overwritten
from paged_kv.steps.step_row import StepRow
from paged_kv.steps.transaction import Scratch


def reserve(pool: PagePool, rows: list[StepRow]) -> Scratch | None:
    """Reserve blocks in all open groups for the tokens of a step, and give back a little of the
    memory that is no longer needed. Returns the blocks beside the block tables, to be held until
    the step is over.

    Writing does so by itself. A model that is asked for masks first can be stopped here,
    before any of its layers has changed anything.

    Before that, full pages are recoded to the format of their sequence.

    Raises:
        PoolExhausted: the budget does not hold the blocks. Full pages may be recoded already.
        BaseException: what copying or mapping raises. Each sequence has the tokens that it had;
            some tables may have reserved blocks, which the caller gives back.
    """
    with pool.lock:
        growing: list[tuple[BlockTable, int, int]] = []
        others: list[SequenceWrite] = []
        for sequence, start, end, *_ in rows:
            for group in pool.groups:
                if group.is_open and end > start:
                    table = sequence.tables.get(group) or sequence.table(group)
                    in_16_bits = table.page_format == table.allocator.page_format
                    if table.owns(start, end) and (in_16_bits or table.is_recoded(start)):
                        growing.append((table, start, end))
                    else:
                        others.append(SequenceWrite(group, sequence, Write(table, start, end)))
        scratch = _reserve_blocks(pool, others) if others else None
        for table, start, end in growing:
            if table.commit(start, end, table.blocks, {}):
                table.allocator.events.written(table, start, end, 0, 0)
        pool.reclaimer.tidy()
        return scratch


def _reserve_blocks(pool: PagePool, step_writes: list[SequenceWrite]) -> Scratch | None:
    unreserved = [each for each in step_writes if not each.write.is_reserved]
    recode_full_pages(pool.reclaimer, unreserved)
    for group, sequence, write in unreserved:
        cache_overwritten(pool.out_of_window, group, sequence, write.end)
    scratch = _reserve_scratch(pool, step_writes)
    writes = _by_group(unreserved)
    if pool.requantisation_policy is None or pool.reclaimer.has(needs_of(writes)):
        reserve_together(pool.reclaimer, writes)
    else:
        reserve_by_page(pool.reclaimer, writes)
    return scratch


def _reserve_scratch(pool: PagePool, step_writes: list[SequenceWrite]) -> Scratch | None:
    needs: dict[LayerGroup, Counter[str]] = {}
    for group, _, write in step_writes:
        if write.needs_scratch:
            needs.setdefault(group, Counter())[write.table.page_format] += 1
    if not needs:
        return None
    pool.reclaimer.make_room(lambda: needs)
    scratch = Scratch()
    for group, sequence, write in step_writes:
        if write.needs_scratch:
            table = group.allocator.new_scratch(write.table.page_format)
            scratch.setdefault(group, {})[sequence.uid] = table
    return scratch


def _by_group(step_writes: list[SequenceWrite]) -> Writes:
    writes: dict[LayerGroup, list[Write]] = {}
    for group, _, write in step_writes:
        writes.setdefault(group, []).append(write)
    return writes
