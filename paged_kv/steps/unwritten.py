"""Holds steps that their rings do not hold yet, and writes them.

A step longer than `write_chunk` would overwrite tokens that some of its queries still see. Those
queries come later, from this layer or from layers that share its keys. So they attend to the ring
as it was and to the unwritten step. The step is written when the next one comes, or when another
operation needs it in pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paged_kv.allocator.block_allocator import BlockTable
from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlock
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, Unwritten
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.window import Window


@dataclass(eq=False)
class UnwrittenStep:
    """One sequence's part of a step.

    Attributes:
        step: the keys [B, heads, S, k_dim] and values [B, heads, S, v_dim] of the batch.
        row: the sequence's index in the batch.
        own: which of the step's S tokens are valid for the sequence.
        has_filled: whether the pages that are cached out of window have got their tokens. A write
            to the ring that failed may have overwritten those that were in it.
    """

    step: Unwritten
    row: int
    own: range
    has_filled: bool = False

    def between(self, first: int, last: int) -> Unwritten:
        """Keys and values [1, heads, last - first, dim] of the valid tokens [first, last)."""
        begin, end = self.own.start + first, self.own.start + last
        keys, values = (part[self.row : self.row + 1, :, begin:end] for part in self.step)
        return keys, values


def write_to_ring(
    step: UnwrittenStep,
    pages: LayerPages,
    window: Window,
    table: BlockTable,
    out_of_window: Mapping[int, OutOfWindowBlock],
    end: int,
) -> None:
    """Write a step of one layer that ends at `end`: first the pages that are cached out of window,
    then its last tokens into the ring."""
    start = end - len(step.own)
    if not step.has_filled:
        _fill_skipped(step, pages, table, out_of_window, start, end)
        step.has_filled = True
    for first, last in window.kept_parts(start, end):
        base = first - first % PAGE_SIZE
        blocks = table.blocks_of(base, last)
        keys, values = step.between(first - start, last - start)
        pages.write(keys, values, AttentionMetadata((blocks,), (last - base,), (0,)))


def _fill_skipped(
    step: UnwrittenStep,
    pages: LayerPages,
    table: BlockTable,
    out_of_window: Mapping[int, OutOfWindowBlock],
    start: int,
    end: int,
) -> None:
    """Fill cached out-of-window blocks with the step's tokens: pages that never were in the ring,
    and pages that were cached before the step was written."""
    for page, cached in out_of_window.items():
        base, last = page * PAGE_SIZE, (page + 1) * PAGE_SIZE
        if cached.block is None or last <= start or base >= end:
            continue
        first = max(base, start)
        if first > base:
            (in_ring,) = table.blocks_of(base, first)
            pages.copy({in_ring: cached.block})
        keys, values = step.between(first - start, last - start)
        pages.write(keys, values, AttentionMetadata(((cached.block,),), (last - base,), (0,)))
