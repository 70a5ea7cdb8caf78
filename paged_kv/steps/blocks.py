"""Finds the blocks of a step before any layer writes: recodes full pages, then reserves.

The law of full pages: a token attends to its own page in 16 bits, and to every earlier page in the
sequence's format, whatever steps the tokens came in. The latest tokens matter most: quantising them
at once costs most of the quality that quantisation costs at all. The first page matters next, so it
has more bits where the others have 4: see `PageFormat.first`.

The page that a step ends in keeps 16 bits, and so does the one that it begins in. When the next
step begins, those of them that are full are recoded, in all layers of a group together. A page that
is shared is recoded once, for all that hold it. `step_parts` has the pages of one step.

A step that writes into a quantised page, after a trim, gets a copy of 16 bits: see `planned`.

A ring overwrites the pages that its window has passed. If later prompts may repeat a sequence's
prompt, these pages are cached instead, page by page, while memory suffices. A cached page is
shared, so copy on write gives the ring another block: one page per 256 tokens is copied, and rings
need no more pages than otherwise. In a long step the window may pass pages that never were in the
ring, or only in part. Those get blocks of their own, which are filled when the step is written.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from paged_kv.allocator.block_allocator import BlockTable
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefixes.prefix_node import OutOfWindowBlocks
from paged_kv.allocator.writes import Write
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.offload.offloading import Offloading
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.layer_kinds import Window
from paged_kv.pool.page_pool import PagePool
from paged_kv.pool.reclaimer import Reclaimer
from paged_kv.steps.sequence import Sequence, StepRow


class Scratch(dict[LayerGroup, dict[str, BlockTable]]):
    """One block for each sequence, by uid, whose step begins within a page and leaves it: see
    `Write.needs_scratch`. Whoever drops it gives the blocks back, at the next call of their
    allocators."""

    def __del__(self) -> None:
        for tables in self.values():
            for table in tables.values():
                table.allocator.drop_later(table)


class SequenceWrite(NamedTuple):
    group: LayerGroup
    sequence: Sequence
    write: Write


def reserve(pool: PagePool, rows: list[StepRow]) -> Scratch | None:
    """Recode full pages, and reserve blocks in all open groups for the tokens of a step; give back
    a little of the memory that is no longer needed.

    Returns the blocks beside the block tables, to be held until the step is over. A model that asks
    for masks first can be stopped here, before any of its layers has changed anything.

    Raises:
        PoolExhausted: the budget does not hold the blocks. Full pages may be recoded already. It
            names a budget that holds the sequences' prompts too.
        BaseException: what copying or mapping raises. Each sequence has the tokens that it had;
            some tables may have reserved blocks, which the caller gives back.
    """
    with pool.lock:
        if pool.offloading is not None:
            _make_frames(pool, pool.offloading, rows)
        growing: list[tuple[BlockTable, int, int]] = []
        others: list[SequenceWrite] = []
        for sequence, (start, *_), (end, *_) in rows:
            for group in pool.groups:
                if group.is_open and end > start:
                    table = sequence.tables.get(group) or sequence.table(group)
                    in_16_bits = table.page_format == table.allocator.page_format
                    if table.owns(start, end) and (in_16_bits or table.is_recoded(start)):
                        growing.append((table, start, end))
                    else:
                        others.append(SequenceWrite(group, sequence, Write(table, start, end)))
        try:
            scratch = _reserve_blocks(pool, others) if others else None
        except PoolExhausted as error:
            raise _with_prompts(error, pool, rows) from error.__cause__
        for table, start, end in growing:
            table.commit(start, end, table.blocks, {})
        pool.reclaimer.tidy()
        return scratch


def _reserve_blocks(pool: PagePool, step_writes: list[SequenceWrite]) -> Scratch | None:
    unreserved = [each for each in step_writes if not each.write.is_reserved]
    _recode_full_pages(pool.reclaimer, unreserved)
    writes: dict[LayerGroup, list[Write]] = {}
    for group, sequence, write in unreserved:
        _cache_overwritten(pool.out_of_window, group, sequence, write.end)
        writes.setdefault(group, []).append(write)
    scratch = _reserve_scratch(pool, step_writes)
    pool.reclaimer.reserve(writes)
    return scratch


def _with_prompts(error: PoolExhausted, pool: PagePool, rows: list[StepRow]) -> PoolExhausted:
    """The error of a step, with a budget that holds the prompts of its sequences too."""
    if error.sufficient_budget is None:
        return error
    size, reclaimer = pool.size, pool.reclaimer
    prompts = [max(row.after.tokens, row.sequence.prompt_tokens) for row in rows]
    whole = sum(map(size.bytes_for, prompts))
    later = whole - sum(size.bytes_for(row.after.tokens) for row in rows)
    more = whole - sum(size.bytes_for(row.before.tokens) for row in rows)
    enough = max(
        reclaimer.holding_more(error.sufficient_budget, later),
        # The error may be of one page of the step, or of its scratch blocks.
        reclaimer.holding(reclaimer.bytes_held + more),
    )
    return replace(error, sufficient_budget=enough, sufficient_tokens=max(prompts))


def _reserve_scratch(pool: PagePool, step_writes: list[SequenceWrite]) -> Scratch | None:
    needs: dict[LayerGroup, Counter[str]] = {}
    for group, _, write in step_writes:
        if write.needs_scratch:
            needs.setdefault(group, Counter())[write.scratch_format] += 1
    if not needs:
        return None
    pool.reclaimer.make_room(lambda: needs)
    scratch = Scratch()
    for group, sequence, write in step_writes:
        if write.needs_scratch:
            table = group.allocator.new_scratch(write.scratch_format)
            scratch.setdefault(group, {})[sequence.uid] = table
    return scratch


def _make_frames(pool: PagePool, offloading: Offloading, rows: list[StepRow]) -> None:
    """Have frames for the pages that a step of one token fetches, or as many as there is room for
    beside the next page of each sequence.

    Raises:
        PoolExhausted: the budget does not hold one.
    """
    (group,) = [group for group in pool.groups if group.offloading is offloading]
    if not group.is_open or max(after.tokens - before.tokens for _, before, after in rows) != 1:
        return
    wanted = offloading.wanted_frames(group.allocator)
    if wanted <= offloading.most_tried:
        return
    # Counted, as making room gives back frames that are no longer needed.
    count = lacking = wanted - len(offloading.frames)
    frame, written = offloading.page_format.name, group.allocator.page_format
    while count:
        needs = Counter({frame: count}) + Counter({written: len(rows)})
        try:
            pool.reclaimer.make_room(partial(dict, {group: needs}))
        except PoolExhausted:
            if count == 1 and not offloading.frames:
                raise
            count //= 2
        else:
            offloading.add_frames(group.allocator, count)
            lacking -= count
            count = min(count, lacking)
    offloading.most_tried = wanted


def _recode_full_pages(reclaimer: Reclaimer, writes: Iterable[SequenceWrite]) -> None:
    """Recode the full pages before each write, in its group, to the formats of their sequence.

    Raises:
        PoolExhausted: the budget does not hold them in both formats. Those that were recoded stay
            so, and no token has changed its place; another call resumes.
        ThreadConflict: another thread has not yet computed its reads of a page that is to change.
    """
    left: dict[tuple[LayerGroup, str], list[SequenceWrite]] = defaultdict(list)
    for each in writes:
        # A conversion that ran out of memory resumes by itself: others may hold the same pages.
        if not each.write.table.is_recoded(each.write.start) and not each.sequence.is_converting:
            for name in each.write.table.full_formats:
                left[each.group, name].append(each)
    for (group, name), theirs in left.items():
        group.recode(partial(_unrecoded, theirs, name), name, reclaimer.make_room)


def recode_sequence(pool: PagePool, sequence: Sequence) -> None:
    """Recode all full pages of a sequence, as its next step would.

    Raises:
        PoolExhausted, ThreadConflict: see `_recode_full_pages`.
    """
    writes = []
    for group in pool.groups:
        if group.is_open and group.window is None:
            end = common_len(sequence, group)
            writes.append(SequenceWrite(group, sequence, Write(sequence.table(group), end, end)))
    _recode_full_pages(pool.reclaimer, writes)


def common_len(sequence: Sequence, group: LayerGroup) -> int:
    """The number of a sequence's tokens that the pages of all layers of a group hold. The group has
    no window, so no layer's step is unwritten."""
    # In the first steps, a layer without pages may not have had its turn.
    layers = group.pages if group.knows_all_layers else group.layers
    return min(sequence.progress(layer).tokens for layer in layers)


def _unrecoded(writes: list[SequenceWrite], name: str) -> set[int]:
    blocks: set[int] = set()
    for group, sequence, write in writes:
        written = min(write.start, common_len(sequence, group))
        blocks.update(write.table.unrecoded(written).get(name, ()))
    return blocks


def _cache_overwritten(
    blocks: OutOfWindowBlocks, group: LayerGroup, sequence: Sequence, end: int
) -> None:
    """Cache the pages that a write up to `end` begins to overwrite, if the ring holds all of their
    slots."""
    window = group.window
    if window is None or not sequence.caches_out_of_window:
        return
    written, ring = sequence.layers.written(group), window.ring
    for begun in range(-(-written // PAGE_SIZE), -(-end // PAGE_SIZE)):
        page = begun - ring.entries
        if page >= ring.head and (page + 1) * PAGE_SIZE <= written:
            block = sequence.blocks(group)[ring.entry(page)]
            out_of_window = sequence.out_of_window.setdefault(group, {})
            out_of_window[page] = blocks.cache(group.allocator, block)


def is_read_first(window: Window, rows: list[StepRow], count: int) -> bool:
    """Whether the queries of a step of `count` tokens attend before it is written: because they see
    tokens that it overwrites, or because an uncached page would be lost."""
    return count > window.write_chunk or any(
        row.sequence.caches_out_of_window
        and _skipped_pages(window, row.before.tokens, row.after.tokens)
        for row in rows
    )


def reserve_skipped(pool: PagePool, rows: list[StepRow]) -> None:
    """In groups with a window, allocate a block for each page that a step completes and overwrites,
    so that no ring ever holds it, while memory suffices."""
    for sequence, _, after in rows:
        start, end = sequence.length, after.tokens
        for group in pool.groups if sequence.caches_out_of_window else ():
            window = group.window
            # While a layer's size is unknown, mapping more now might exceed the budget later.
            if window is None or not group.knows_all_layers:
                continue
            first_held = window.first_held(sequence.layers.written(group))
            for page in _skipped_pages(window, start, end):
                if page * PAGE_SIZE >= min(start, first_held):
                    out_of_window = pool.reclaimer.spare_block(group)
                    if out_of_window is not None:
                        sequence.out_of_window.setdefault(group, {})[page] = out_of_window


def _skipped_pages(window: Window, start: int, end: int) -> range:
    """The pages that writing [start, end) completes and overwrites."""
    first = max(window.ring.head, start // PAGE_SIZE)
    return range(first, min(end // PAGE_SIZE, -(-(end - window.capacity) // PAGE_SIZE)))
