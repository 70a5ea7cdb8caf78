"""Tells kernels where they find the tokens that a step attends to, and which ones its queries see.

A token attends to its own page in 16 bits, and to every earlier page in the sequence's format. So a
step is cut where a row of it begins a page, and its parts are written and attended to one after the
other. Each recodes the pages that it has filled.

A page that is recoded into a block of few bits is written in the block of the step's last page. So
it does not matter when the block got its format: when it was reserved, or since, because memory got
short and the pool requantised it.

Masks are made by mlx-lm's rules. What a mask lets queries see is found without computing it, so
that kernels need no array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from paged_kv.allocator.block_allocator import BlockTable
from paged_kv.allocator.writes import Write
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.dense_attention import batch_mask, causal_window_mask
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.layer_kinds import Window
from paged_kv.steps.sequence import StepRow


def attention_metadata(
    group: LayerGroup, rows: list[StepRow], *, read_first: bool = False
) -> AttentionMetadata:
    """Of a step in the layers of a group. With `read_first`, no page holds the step itself yet."""
    if group.window is not None:
        return _ring_metadata(group, group.window, rows, read_first)
    tables, ends, right_padding = [], [], []
    for sequence, _, (end, _, padding) in rows:
        table = sequence.tables.get(group)
        tables.append(() if table is None else table.blocks)
        ends.append(end)
        right_padding.append(padding.right)
    group.latest_tables = group.latest_tables.after(tables)
    return AttentionMetadata(group.latest_tables, tuple(ends), tuple(right_padding))


class StepPart(NamedTuple):
    """The tokens of a step between two cuts, and where all tokens up to these are while the queries
    of these attend.

    Attributes:
        resumed: the page copies (from block, to block) to make before the part is written.
        recoded: the page copies to make before the next part attends.
    """

    tokens: slice
    metadata: AttentionMetadata
    resumed: dict[int, int]
    recoded: dict[int, int]


def step_parts(
    group: LayerGroup, rows: list[StepRow], count: int, scratch: Mapping[str, BlockTable]
) -> list[StepPart]:
    """The parts of a step of `count` tokens, padding included, in a group without a window; none if
    it recodes no page.

    `scratch` holds the recoded page that a row's step begins in, by uid: see `Write.needs_scratch`.
    """
    pages = [
        _RowPages(row, row.sequence.table(group), scratch.get(row.sequence.uid)) for row in rows
    ]
    cuts = sorted({cut for row in pages for cut in row.cuts})
    if not cuts:
        return []
    parts = []
    resumed = {source: to for row in pages for source, to in row.resumed.items()}
    for start, end in zip((0, *cuts), (*cuts, count), strict=True):
        tables, lengths, padding = zip(*[row.metadata(end) for row in pages], strict=True)
        recoded = {source: to for row in pages for source, to in row.recoded_at(end)}
        metadata = AttentionMetadata(tables, lengths, padding)
        parts.append(StepPart(slice(start, end), metadata, {} if start else resumed, recoded))
    return parts


class _RowPages:
    """The pages of one sequence during a step.

    Attributes:
        cuts: the indices of the step's tokens that begin a page after one that is recoded.
        resumed: the page copy that gives the step's first page 16 bits again, if it needs one.
    """

    def __init__(self, row: StepRow, table: BlockTable, scratch: BlockTable | None) -> None:
        self._row = row
        self._blocks = table.blocks
        # By page: the block that its tokens are written in, and the one that it is recoded into.
        self._recoded: dict[int, tuple[int, int]] = {}
        self.resumed: dict[int, int] = {}
        write = Write(table, row.before.tokens, row.after.tokens)
        for page in write.left_pages:
            block, last = table.blocks[page], table.blocks[write.left_pages.stop]
            holds_earlier = page == write.left_pages.start and write.begins_within_page
            if not table.allocator.is_writable(block):
                self._recoded[page] = last, block
                if holds_earlier:
                    self.resumed = {block: last}
            elif holds_earlier and scratch is not None:
                self._recoded[page] = block, scratch.blocks[0]
        self.cuts = [(page + 1) * PAGE_SIZE - row.before.offset for page in self._recoded]

    def metadata(self, end: int) -> tuple[tuple[int, ...], int, int]:
        """Block table, context length and right padding at the step's first `end` tokens."""
        _, before, after = self._row
        position = before.offset + end
        length = min(max(position, before.tokens), after.tokens)
        latest = max(0, length - 1) // PAGE_SIZE
        blocks = list(self._blocks[: latest + 1])
        for page, (written, recoded) in self._recoded.items():
            if page <= latest:
                blocks[page] = written if page == latest else recoded
        return tuple(blocks), length, max(0, position - length)

    def recoded_at(self, end: int) -> list[tuple[int, int]]:
        """The page copy to make after the step's first `end` tokens, if any."""
        page = (self._row.before.offset + end) // PAGE_SIZE - 1
        return [self._recoded[page]] if end in self.cuts else []


def _ring_metadata(
    group: LayerGroup, window: Window, rows: list[StepRow], read_first: bool
) -> AttentionMetadata:
    """Metadata for a window. Each table begins with the page of the first token in the window of
    the step's first query, preceded by the head's pages if they are not adjacent."""
    tables, lengths, firsts, heads = [], [], [], []
    for sequence, (before, *_), (end, *_) in rows:
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
    padding = tuple([row.after.padding.right for row in rows])
    return AttentionMetadata(tuple(tables), tuple(lengths), padding, tuple(firsts), head_tokens)


class PagedMask(mx.array):
    """A lazy causal mask that a cache made: attention can recognise it without computing it.

    Boolean [S, T] for one sequence, [B, 1, S, T] for a batch. `visible_lens` and `right_padding`
    are those of its `AttentionMetadata`. A query sees `window` tokens, itself included; None for
    all.
    """

    visible_lens: tuple[int, ...]
    right_padding: tuple[int, ...]
    window: int | None

    def __getitem__(self, index: Any) -> mx.array:
        """Models cut a mask to the number of keys: the whole of it stays recognisable."""
        if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis:
            last, tokens = index[1], self.shape[-1]
            if isinstance(last, slice) and last.indices(tokens) == (0, tokens, 1):
                return self
        return super().__getitem__(index)

    def hides_in(self, metadata: AttentionMetadata, queries: int) -> bool:
        """Whether this is the mask of a step of `queries` tokens with the lengths of `metadata`."""
        ends_alike = (self.visible_lens, self.right_padding) == (
            metadata.visible_lens,
            metadata.right_padding,
        )
        return ends_alike and self.shape[-2] == queries


def step_mask(
    rows: list[StepRow],
    count: int,
    window: Window | None,
    *,
    return_array: bool,
    window_size: int | None,
) -> mx.array | str | None:
    """The mask of a step of `count` tokens in layers with that window.

    For one sequence None, "causal", or boolean [S, T]; for a batch always boolean [B, 1, S, T].
    """
    if len(rows) == 1:
        if count == 1 and window is None and window_size is None:
            return None
        if not _is_array(rows[0].before.tokens, count, window, return_array, window_size):
            return None if count == 1 else "causal"
    lengths = []
    for _, before, after in rows:
        first = 0 if window is None else window.first_visible(before.tokens) - window.sink_tokens
        lengths.append(after.tokens - max(0, first))
    padding = tuple([row.after.padding.right for row in rows])
    metadata = AttentionMetadata((), tuple(lengths), padding)
    size, sink_tokens = window_size, 0
    if window is not None:
        sink_tokens = window.sink_tokens
        size = window.size if window_size is None else window_size - sink_tokens
    if len(rows) == 1:
        mask = PagedMask(causal_window_mask(metadata.ends[0], count, size, sink_tokens))
    else:
        mask = PagedMask(batch_mask(metadata, count, size, sink_tokens))
    mask.visible_lens, mask.right_padding = metadata.visible_lens, metadata.right_padding
    mask.window = size
    return mask


def _is_array(
    before: int, count: int, window: Window | None, return_array: bool, window_size: int | None
) -> bool:
    """Whether the mask of one sequence must be an array."""
    if window is None:
        return window_size is not None or (return_array and count > 1)
    longest = window.size + window.sink_tokens
    if count == 1:
        return window_size is not None and window_size <= min(before, longest - 1)
    return return_array or min(longest - 1, before) + count > (window_size or longest)


class Visibility(NamedTuple):
    """What the queries of a step see: `causal` and `window` of their `Attention`. If there is a
    `wider_window`, all but the first query see that one."""

    causal: bool
    window: int | None = None
    wider_window: int | None = None


def visible(
    mask: mx.array | str | None, queries: int, metadata: AttentionMetadata, window: Window | None
) -> Visibility | None:
    """What a mask lets a step's queries see in layers with that window; None if only an array can
    express it.

    A boolean mask of the model's own is computed if it may be that of a window.
    """
    if isinstance(mask, PagedMask) and not mask.hides_in(metadata, queries):
        return None
    if window is None:
        if mask is None or isinstance(mask, PagedMask):
            return Visibility(mask is not None, None if mask is None else mask.window)
        return Visibility(causal=True) if isinstance(mask, str) and mask == "causal" else None
    if window.sink_tokens:
        hides_any = any(metadata.first_tokens) or (
            max(metadata.visible_lens) > window.size + window.sink_tokens
        )
        is_array = isinstance(mask, mx.array)
        return None if hides_any or is_array else Visibility(mask is not None)
    size = _window_of(mask, queries, metadata, window)
    if size is None or (queries > 1 and size > window.size + 1):
        return None
    if queries == 1 or size <= window.size:
        return Visibility(mask is not None, min(window.size, size))
    # One more than the layers hold: the window of the first query ends where theirs does.
    return Visibility(mask is not None, window.size, size)


def _window_of(
    mask: mx.array | str | None, queries: int, metadata: AttentionMetadata, window: Window
) -> int | None:
    """How many tokens a query sees by the mask, itself included; None if it sees no window."""
    if isinstance(mask, PagedMask):
        return mask.window
    if mask is None:
        return window.size if queries == 1 else None
    if isinstance(mask, str) and mask == "causal":
        return max(metadata.visible_lens)
    return _latest_seen(mask, queries, metadata)


def _latest_seen(mask: object, queries: int, metadata: AttentionMetadata) -> int | None:
    """How many of the latest tokens one query of one sequence sees by a mask of the model's own, if
    it sees those only. So models that attend by chunks read pages while they decode."""
    lengths = metadata.visible_lens
    if queries != 1 or len(lengths) != 1:
        return None
    if not isinstance(mask, mx.array) or mask.dtype != mx.bool_ or mask.size != lengths[0]:
        return None
    seen = np.asarray(mask).reshape(-1)
    count = int(seen.sum())
    return count if count and seen[-count:].all() else None
