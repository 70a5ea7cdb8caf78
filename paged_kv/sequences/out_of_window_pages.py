"""What happens to the pages of a ring that its window has passed.

A ring writes over them. For sequences whose prompts others may repeat they are retired instead,
page by page, and stay while there is room. A page that is retired is shared, so the ring goes on in
a copy of it: one page in 256 tokens is copied, rings need no page more than otherwise, and
whatever rings can do they still can.

A step may be so long that pages pass which were never in the ring, or not with all their rows.
Those get blocks of their own, which are filled when the step is written.
"""

from __future__ import annotations

from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlocks
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.reclaimer import Reclaimer
from paged_kv.pool.window import Window
from paged_kv.sequences.sequence import Sequence
from paged_kv.sequences.step_row import StepRow


def cache_leaving(
    blocks: OutOfWindowBlocks, group: LayerGroup, sequence: Sequence, end: int
) -> None:
    """Retire the pages of a ring that writing up to `end` begins to write over, if all their rows
    are in it."""
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


def is_read_first(window: Window | None, rows: list[StepRow], count: int) -> bool:
    """Whether a step of `count` tokens is attended to before it is written: because its queries see
    what it writes over, or because a page would be lost."""
    if window is None or count > window.write_chunk:
        return window is not None
    return any(
        row.sequence.caches_out_of_window and _unseen_pages(window, row.before, row.end)
        for row in rows
    )


def keep_unseen(
    reclaimer: Reclaimer, groups: list[LayerGroup], sequence: Sequence, end: int
) -> None:
    """Own a block for each page that a step up to `end` ends and writes over, in groups with a
    window, while there is room."""
    if not sequence.caches_out_of_window:
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
                out_of_window = reclaimer.spare_block(group, page_format)
                if out_of_window is not None:
                    sequence.out_of_window.setdefault(group, {})[page] = out_of_window


def _unseen_pages(window: Window, start: int, end: int) -> range:
    """The pages that writing [start, end) ends and writes over."""
    first = max(window.ring.head, start // PAGE_SIZE)
    return range(first, min(end // PAGE_SIZE, -(-(end - window.capacity) // PAGE_SIZE)))
