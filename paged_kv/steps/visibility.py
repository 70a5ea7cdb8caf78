"""Finds out whether lengths and a window express a mask, so that kernels need no array."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.pool.window import Window
from paged_kv.steps.masks import PagedMask


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
    asked = _window_of(mask, queries, metadata, window)
    if asked is None or (queries > 1 and asked > window.size + 1):
        return None
    if queries == 1 or asked <= window.size:
        return Visibility(mask is not None, min(window.size, asked))
    # One more than the layers hold: the window of the first query ends where theirs does.
    return Visibility(mask is not None, window.size, asked)


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
