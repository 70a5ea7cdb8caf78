"""Which tokens a query may see."""

import mlx.core as mx

from paged_kv.kernels.page_rows import PageRows


def causal_window_mask(length: int, queries: int, window: int | None) -> mx.array:
    """Boolean [queries, length]: the last `queries` of `length` tokens see themselves and what is
    before them, less than `window` positions back."""
    keys = mx.arange(length)[None]
    at = mx.arange(length - queries, length)[:, None]
    mask = at >= keys
    return mask if window is None else mask & (at < keys + window)


def batch_mask(rows: PageRows, queries: int, window: int | None) -> mx.array:
    """Boolean [B, 1, queries, T] for keys laid out as `Backend.gather` does: the mask above, which
    is the same for all rows, and for each row without what lies before its first token."""
    length = max(rows.ends)
    starts = mx.array([length - end for end in rows.ends])[:, None, None, None]
    return causal_window_mask(length, queries, window) & (mx.arange(length) >= starts)
