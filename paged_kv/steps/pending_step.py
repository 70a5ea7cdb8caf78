"""Holds a step that is written to a ring after its queries have attended.

A step longer than `write_chunk` would overwrite tokens that some of its queries still see. Those
queries come later, from this layer or from layers that share its keys. So they attend to the ring
as it was and to the unwritten step. The step is written when the next one comes, or when another
operation needs it in pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlock
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, NewTokens
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.window import Window


@dataclass(eq=False)
class PendingStep:
    """One sequence's part of a step.

    Attributes:
        step: the keys [B, heads, S, k_dim] and values [B, heads, S, v_dim] of the batch.
        row: the sequence's index in the batch.
        own: which of the step's S tokens are valid for the sequence.
        has_filled: whether the pages that are cached out of window have got their tokens. A write
            to the ring that failed may have overwritten those that were in it.
    """

    step: NewTokens
    row: int
    own: range
    has_filled: bool = False

    def between(self, first: int, last: int) -> NewTokens:
        """Keys and values [1, heads, last - first, dim] of the valid tokens [first, last)."""
        begin, end = self.own.start + first, self.own.start + last
        keys, values = (part[self.row : self.row + 1, :, begin:end] for part in self.step)
        return keys, values


def write_pending(
    pages: LayerPages,
    window: Window,
    table: BlockTable,
    out_of_window: Mapping[int, OutOfWindowBlock],
    pending: PendingStep,
    end: int,
) -> None:
    """Write a step of one layer that ends at `end`: first the pages that are cached out of window,
    then its last tokens into the ring."""
    start = end - len(pending.own)
    if not pending.has_filled:
        _write_skipped(pages, table, out_of_window, pending, start, end)
        pending.has_filled = True
    for first, last in window.kept_parts(start, end):
        base = first - first % PAGE_SIZE
        blocks = table.blocks_of(base, last)
        keys, values = pending.between(first - start, last - start)
        pages.write(keys, values, AttentionMetadata((blocks,), (last - base,), (0,)))


def _write_skipped(
    pages: LayerPages,
    table: BlockTable,
    out_of_window: Mapping[int, OutOfWindowBlock],
    pending: PendingStep,
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
        keys, values = pending.between(first - start, last - start)
        pages.write(keys, values, AttentionMetadata(((cached.block,),), (last - base,), (0,)))
