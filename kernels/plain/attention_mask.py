"""Makes boolean masks of the tokens that each query sees."""

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata


def causal_window_mask(
    length: int, queries: int, window: int | None, sink_tokens: int = 0
) -> mx.array:
    """Boolean [queries, length]: each of the last `queries` of `length` tokens sees itself, the
    tokens less than `window` positions before it, and the sink tokens before it."""
    keys = mx.arange(length)[None]
    at = mx.arange(length - queries, length)[:, None]
    mask = at >= keys
    return mask if window is None else mask & ((at < keys + window) | (keys < sink_tokens))


def batch_mask(
    metadata: AttentionMetadata, queries: int, window: int | None, sink_tokens: int = 0
) -> mx.array:
    """Boolean [B, 1, queries, T] for keys laid out as by `Backend.gather`: `causal_window_mask`
    with the sink tokens of each sequence, and without the padding before its first token."""
    length = max(metadata.ends)
    starts = mx.array([length - end for end in metadata.ends])[:, None, None, None]
    keys = mx.arange(length)
    mask = causal_window_mask(length, queries, window)
    if sink_tokens:
        at = mx.arange(length - queries, length)[:, None]
        mask = mask | ((keys < starts + sink_tokens) & (at >= keys))
    return mask & (keys >= starts)
