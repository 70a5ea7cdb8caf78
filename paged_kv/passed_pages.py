"""What happens to the pages of a ring that its window has passed.

A ring writes over them. For sequences whose prompts others may repeat they are retired instead,
page by page, and stay while there is room. A page that is retired is shared, so the ring goes on in
a copy of it: one page in 256 tokens is copied, rings need no page more than otherwise, and
whatever rings can do they still can.

A step may be so long that pages pass which were never in the ring, or not with all their rows.
Those get blocks of their own, which are filled when the step is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_kv.kernels.page_format import PAGE_SIZE
from paged_kv.kernels.page_rows import PageRows
from paged_kv.pending_step import PendingStep

if TYPE_CHECKING:
    from paged_kv.allocator.retired_blocks import RetiredBlocks
    from paged_kv.kernels.layer_pages import LayerPages
    from paged_kv.layer_group import LayerGroup
    from paged_kv.pool_room import PoolRoom
    from paged_kv.sequence import Sequence
    from paged_kv.step_row import StepRow
    from paged_kv.window import Window


def retire_leaving(blocks: RetiredBlocks, group: LayerGroup, sequence: Sequence, end: int) -> None:
    """Retire the pages of a ring that writing up to `end` begins to write over, if all their rows
    are in it."""
    window = group.window
    if window is None or not sequence.retires:
        return
    written, ring = sequence.written(group), window.ring
    for begun in range(-(-written // PAGE_SIZE), -(-end // PAGE_SIZE)):
        page = begun - ring.entries
        if page >= ring.head and (page + 1) * PAGE_SIZE <= written:
            block = sequence.blocks(group)[ring.entry(page)]
            passed = sequence.passed.setdefault(group, {})
            passed[page] = blocks.retire(group.allocator, block)


def is_read_first(window: Window | None, rows: list[StepRow], count: int) -> bool:
    """Whether a step of `count` tokens is attended to before it is written: because its queries see
    what it writes over, or because a page would be lost."""
    if window is None or count > window.write_chunk:
        return window is not None
    return any(row.sequence.retires and _unseen_pages(window, row.before, row.end) for row in rows)


def keep_unseen(room: PoolRoom, groups: list[LayerGroup], sequence: Sequence, end: int) -> None:
    """Own a block for each page that a step up to `end` ends and writes over, in groups with a
    window, while there is room."""
    if not sequence.retires:
        return
    start, page_format = sequence.length, sequence.page_format.name
    for group in groups:
        window = group.window
        # While a layer's size is not known, what is mapped now may turn out to be too much.
        if window is None or not group.is_settled:
            continue
        first_held = window.first_held(sequence.written(group))
        for page in _unseen_pages(window, start, end):
            if page * PAGE_SIZE >= min(start, first_held):
                retired = room.spare_block(group, page_format)
                if retired is not None:
                    sequence.passed.setdefault(group, {})[page] = retired


def write_pending(group: LayerGroup, layer: int, sequence: Sequence, pending: PendingStep) -> None:
    """Write a step of one layer: what of it passes unseen first, then its end into the ring."""
    assert group.window is not None
    end = sequence.context_lens[layer]
    start = end - len(pending.own)
    _write_unseen(group.pages[layer], group, sequence, pending, start, end)
    for first, last in group.window.kept_parts(start, end):
        base = first - first % PAGE_SIZE
        blocks = sequence.table(group).blocks_of(base, last)
        keys, values = pending.between(first - start, last - start)
        group.pages[layer].write(keys, values, PageRows((blocks,), (last - base,), (0,)))


def _write_unseen(
    pages: LayerPages,
    group: LayerGroup,
    sequence: Sequence,
    pending: PendingStep,
    start: int,
    end: int,
) -> None:
    """Fill the blocks of pages that were never in the ring, and of those that were retired while
    the step was in no page yet."""
    for page, retired in sequence.passed.get(group, {}).items():
        base, last = page * PAGE_SIZE, (page + 1) * PAGE_SIZE
        if retired.block is None or last <= start or base >= end:
            continue
        first = max(base, start)
        if first > base:
            (in_ring,) = sequence.table(group).blocks_of(base, first)
            pages.copy({in_ring: retired.block})
        keys, values = pending.between(first - start, last - start)
        pages.write(keys, values, PageRows(((retired.block,),), (last - base,), (0,)))


def _unseen_pages(window: Window, start: int, end: int) -> range:
    """The pages that writing [start, end) ends and writes over."""
    first = max(window.ring.head, start // PAGE_SIZE)
    return range(first, min(end // PAGE_SIZE, -(-(end - window.capacity) // PAGE_SIZE)))
