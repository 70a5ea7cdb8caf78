"""Which tokens a query may see."""

import mlx.core as mx

from paged_kv.kernels.pages.page_rows import PageRows


def causal_window_mask(length: int, queries: int, window: int | None, keep: int = 0) -> mx.array:
    """Boolean [queries, length]: the last `queries` of `length` tokens see themselves and what is
    before them, less than `window` positions back, and of the first `keep` all before them."""
    keys = mx.arange(length)[None]
    at = mx.arange(length - queries, length)[:, None]
    mask = at >= keys
    return mask if window is None else mask & ((at < keys + window) | (keys < keep))


def batch_mask(rows: PageRows, queries: int, window: int | None, keep: int = 0) -> mx.array:
    """Boolean [B, 1, queries, T] for keys laid out as `Backend.gather` does: the mask above, each
    row with its own first tokens, and without what lies before them."""
    length = max(rows.ends)
    starts = mx.array([length - end for end in rows.ends])[:, None, None, None]
    keys = mx.arange(length)
    mask = causal_window_mask(length, queries, window)
    if keep:
        at = mx.arange(length - queries, length)[:, None]
        mask = mask | ((keys < starts + keep) & (at >= keys))
    return mask & (keys >= starts)
