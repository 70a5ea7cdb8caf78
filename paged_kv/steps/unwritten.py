"""Holds what no page holds yet: steps that their rings do not hold, and inputs of open groups.

A step longer than `write_chunk` would overwrite tokens that some of its queries still see. Those
queries come later, from this layer or from layers that share its keys. So they attend to the ring
as it was and to the unwritten step. The step is written when the next one comes, or when another
operation needs it in pages.

Rows of layers that append them at rates of their own are computed from groups of tokens. What the
open group of a layer is computed from is kept here: see `AppendedRows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from paged_kv.allocator.block_table import BlockTable
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


@dataclass(frozen=True, eq=False)
class GroupInputs:
    """The inputs of a sequence's latest tokens, more of them than are in an open group: a trim may
    open an earlier one again.

    Attributes:
        step: the tokens' inputs, in order, each array [1, tokens, dim].
    """

    step: tuple[mx.array, ...] = ()

    def __len__(self) -> int:
        return sum(each.shape[1] for each in self.step)

    def followed_by(self, inputs: mx.array, most: int) -> GroupInputs:
        """These and those of the next tokens, the last `most` of them or a few more."""
        known, steps = inputs.shape[1], [inputs[:, -most:]]
        for each in reversed(self.step):
            if known >= most:
                break
            steps.append(each)
            known += each.shape[1]
        return GroupInputs(tuple(reversed(steps)))

    def without_last(self, count: int) -> GroupInputs:
        """These but for those of the last `count` tokens."""
        steps = list(self.step)
        while count and steps:
            last = steps.pop()
            if last.shape[1] > count:
                steps.append(last[:, :-count])
                break
            count -= last.shape[1]
        return GroupInputs(tuple(steps))

    def last(self, count: int) -> mx.array:
        """Those of the last `count` tokens, at least 1, [1, count, dim]."""
        known = 0
        for index, each in enumerate(reversed(self.step), 1):
            known += each.shape[1]
            if known >= count:
                steps = list(self.step[-index:])
                return (mx.concatenate(steps, axis=1) if index > 1 else steps[0])[:, -count:]
        raise AssertionError(f"the inputs of {count} tokens were asked for, {known} are kept")
