"""Where the kernels find what a layer's sequences see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_kv.kernels.page_format import PAGE_SIZE
from paged_kv.kernels.page_rows import PageRows

if TYPE_CHECKING:
    from paged_kv.layer_group import LayerGroup
    from paged_kv.sequence import Sequence
    from paged_kv.window import Window


def rows_of(
    group: LayerGroup, layer: int, sequences: list[Sequence], *, in_tail: bool = False
) -> PageRows:
    """What the sequences' latest step sees in one layer of a group.

    `in_tail` says that the step itself is in no page yet.
    """
    padding = tuple([sequence.padding[layer].right for sequence in sequences])
    if group.window is not None:
        return _ring_rows(group, group.window, layer, sequences, padding, in_tail)
    tables = tuple([sequence.blocks(group) for sequence in sequences])
    return PageRows(tables, tuple([s.context_lens[layer] for s in sequences]), padding)


def _ring_rows(
    group: LayerGroup,
    window: Window,
    layer: int,
    sequences: list[Sequence],
    padding: tuple[int, ...],
    in_tail: bool,
) -> PageRows:
    """Tables that begin with the page of the first token that the step's first query sees, and
    before it the pages of a head that it does not reach."""
    tables, lengths, firsts, heads = [], [], [], []
    for sequence in sequences:
        end = sequence.context_lens[layer]
        before = end - sequence.step_lens[layer]
        first, keep = window.first_visible(before), window.keep
        if first <= keep:
            first = keep = 0
        apart = first >= window.head_end > 0
        base = 0 if first < window.head_end else first - first % PAGE_SIZE
        table = sequence.table(group)
        head = table.blocks_of(0, window.head_end) if apart else ()
        tables.append(head + table.blocks_of(base, before if in_tail else end))
        shift = len(head) * PAGE_SIZE - base
        lengths.append(end + shift)
        firsts.append(first + shift if first else 0)
        heads.append(keep)
    head_tokens = tuple(heads) if window.keep else ()
    return PageRows(tuple(tables), tuple(lengths), padding, tuple(firsts), head_tokens)
