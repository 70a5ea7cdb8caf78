"""Makes the attention metadata of a step: where the kernels find the tokens that it attends to."""

from __future__ import annotations

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.window import Window
from paged_kv.sequences.step_row import StepRow


def attention_metadata(
    group: LayerGroup, rows: list[StepRow], *, read_first: bool = False
) -> AttentionMetadata:
    """The attention metadata of a step in the layers of a group.

    With `read_first`, no page holds the step itself yet.
    """
    padding = tuple([row.padding.right for row in rows])
    if group.window is not None:
        return _ring_metadata(group, group.window, rows, padding, read_first)
    tables = tuple([row.sequence.blocks(group) for row in rows])
    return AttentionMetadata(tables, tuple([row.end for row in rows]), padding)


def _ring_metadata(
    group: LayerGroup,
    window: Window,
    rows: list[StepRow],
    padding: tuple[int, ...],
    read_first: bool,
) -> AttentionMetadata:
    """Metadata for a window. Each table begins with the page of the first token in the window of
    the step's first query, preceded by the head's pages if they are not adjacent."""
    tables, lengths, firsts, heads = [], [], [], []
    for sequence, before, end, *_ in rows:
        first, sink_tokens = window.first_visible(before), window.sink_tokens
        if first <= sink_tokens:
            first = sink_tokens = 0
        apart = first >= window.head_end > 0
        base = 0 if first < window.head_end else first - first % PAGE_SIZE
        table = sequence.table(group)
        head = table.blocks_of(0, window.head_end) if apart else ()
        tables.append(head + table.blocks_of(base, before if read_first else end))
        shift = len(head) * PAGE_SIZE - base
        lengths.append(end + shift)
        firsts.append(first + shift if first else 0)
        heads.append(sink_tokens)
    head_tokens = tuple(heads) if window.sink_tokens else ()
    return AttentionMetadata(tuple(tables), tuple(lengths), padding, tuple(firsts), head_tokens)
