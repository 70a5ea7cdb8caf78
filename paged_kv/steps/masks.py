"""Makes the masks of a cache, by mlx-lm's rules, and tells what a mask lets queries see, so that
kernels need no array."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.dense_attention import batch_mask, causal_window_mask
from paged_kv.pool.window import Window
from paged_kv.steps.sequence import StepRow


class PagedMask(mx.array):
    """A lazy causal mask that a cache made: attention can recognise it without computing it.

    Boolean [S, T] for one sequence, [B, 1, S, T] for a batch.

    Attributes:
        visible_lens: tokens of each sequence, including this step.
        right_padding: padding tokens after those, as in `AttentionMetadata`.
        window: number of tokens that a query sees, itself included; None for all.
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
    ends = _ends(rows, window)
    if window is None:
        return paged_mask(ends, count, window_size)
    size = window.size if window_size is None else window_size - window.sink_tokens
    return paged_mask(ends, count, size, window.sink_tokens)


def paged_mask(
    metadata: AttentionMetadata, queries: int, window: int | None, sink_tokens: int = 0
) -> PagedMask:
    """The mask of a step of `queries` tokens; ignores the block tables of `metadata`."""
    if len(metadata.ends) == 1:
        mask = PagedMask(causal_window_mask(metadata.ends[0], queries, window, sink_tokens))
    else:
        mask = PagedMask(batch_mask(metadata, queries, window, sink_tokens))
    mask.visible_lens = metadata.visible_lens
    mask.right_padding = metadata.right_padding
    mask.window = window
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


def _ends(rows: list[StepRow], window: Window | None) -> AttentionMetadata:
    """The lengths and padding after a step, without block tables."""
    lengths = []
    for _, before, after in rows:
        first = 0 if window is None else window.first_visible(before.tokens) - window.sink_tokens
        lengths.append(after.tokens - max(0, first))
    return AttentionMetadata((), tuple(lengths), tuple([row.after.padding.right for row in rows]))


class Visibility(NamedTuple):
    """What the queries of a step see.

    Attributes:
        causal: of the `Attention` for it.
        window: of the `Attention` for it; for its first query alone if there is a wider window.
        wider_window: of the `Attention` for its other queries; None if all have the same.
    """

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
