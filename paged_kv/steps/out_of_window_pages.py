"""Caches the pages of a ring that its window has passed.

A ring overwrites such pages. If later prompts may repeat a sequence's prompt, its pages are cached
instead, page by page, while memory suffices. A cached page is shared, so copy on write gives the
ring another block: one page per 256 tokens is copied, and rings need no more pages than otherwise.

In a long step the window may pass pages that never were in the ring, or only in part. Those get
blocks of their own, which are filled when the step is written.
"""

from __future__ import annotations

from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlocks
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.reclaimer import Reclaimer
from paged_kv.pool.window import Window
from paged_kv.steps.sequence import Sequence
from paged_kv.steps.step_row import StepRow


def cache_overwritten(
    blocks: OutOfWindowBlocks, group: LayerGroup, sequence: Sequence, end: int
) -> None:
    """Cache the pages that a write up to `end` begins to overwrite, if the ring holds all of their
    slots."""
    window = group.window
    if window is None or not sequence.caches_out_of_window:
        return
    written, ring = sequence.written(group), window.ring
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
        row.sequence.caches_out_of_window and _skipped_pages(window, row.before, row.end)
        for row in rows
    )


def reserve_skipped(
    reclaimer: Reclaimer, groups: list[LayerGroup], sequence: Sequence, end: int
) -> None:
    """In groups with a window, allocate a block for each page that a step up to `end` completes and
    overwrites, while memory suffices."""
    if not sequence.caches_out_of_window:
        return
    start = sequence.length
    for group in groups:
        window = group.window
        # While a layer's size is unknown, mapping more now might exceed the budget later.
        if window is None or not group.knows_all_layers:
            continue
        first_held = window.first_held(sequence.written(group))
        for page in _skipped_pages(window, start, end):
            if page * PAGE_SIZE >= min(start, first_held):
                out_of_window = reclaimer.spare_block(group)
                if out_of_window is not None:
                    sequence.out_of_window.setdefault(group, {})[page] = out_of_window


def _skipped_pages(window: Window, start: int, end: int) -> range:
    """The pages that writing [start, end) completes and overwrites."""
    first = max(window.ring.head, start // PAGE_SIZE)
    return range(first, min(end // PAGE_SIZE, -(-(end - window.capacity) // PAGE_SIZE)))
