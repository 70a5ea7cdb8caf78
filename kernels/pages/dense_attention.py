"""Attention with MLX's own operations, sequence by sequence, and its masks.

`read(row)` gives the keys and values [1, heads, tokens, dim] of a sequence's valid tokens.
"""

from collections.abc import Callable

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata

Read = Callable[[int], tuple[mx.array, mx.array]]


def attend_by_sequence(
    read: Read,
    queries: mx.array,
    metadata: AttentionMetadata,
    v_dim: int,
    attention: Attention,
    position_queries: mx.array | None = None,
) -> mx.array:
    """See `Backend.attend`."""

    def attend_row(row: int, own: slice) -> mx.array:
        keys, values = read(row)
        asked, positions = queries[row : row + 1, :, own], position_queries
        if positions is not None:
            positions = positions[row : row + 1, :, own]
        length, count = keys.shape[2], asked.shape[2]
        mask: mx.array | str | None = None  # the cheapest one that suffices
        if attention.window is not None and length > attention.window:
            mask = causal_window_mask(length, count, attention.window)
        elif attention.hides_later and count > 1:
            mask = "causal"
        return attend_to(keys, values, asked, attention, mask, positions)

    dim = v_dim if position_queries is None else queries.shape[3]
    return by_row(queries, metadata, dim, attend_row)


def attend_to(
    keys: mx.array,
    values: mx.array,
    queries: mx.array,
    attention: Attention,
    mask: mx.array | str | None,
    position_queries: mx.array | None = None,
) -> mx.array:
    """Attention to tokens in one array. The mask is boolean [..., S, T], "causal" or None."""
    if position_queries is None and attention.softcap is None:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=attention.scale, mask=mask, sinks=attention.sinks
        )
    seen = causal_window_mask(keys.shape[2], queries.shape[2], None) if mask == "causal" else mask
    assert not isinstance(seen, str)
    if position_queries is None:
        return _softcapped(queries, keys, values, attention, seen)
    scores = position_queries @ values.swapaxes(-1, -2)
    if seen is not None:
        scores = mx.where(seen, scores, mx.finfo(scores.dtype).min)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, keys, scale=attention.scale, mask=scores.astype(queries.dtype)
    )


def _softcapped(
    queries: mx.array, keys: mx.array, values: mx.array, attention: Attention, seen: mx.array | None
) -> mx.array:
    """Attention [B, q_heads, S, v_dim] with a softcap to tokens in one array, computed in float32;
    `seen` is the mask, boolean [..., S, T]."""
    softcap = attention.softcap
    assert softcap is not None
    wide_queries, wide_keys, wide_values = (
        each.astype(mx.float32) for each in (queries, keys, values)
    )
    by_kv_head = mx.unflatten(wide_queries, 1, (keys.shape[1], -1))
    scores = mx.flatten(by_kv_head @ wide_keys[:, :, None].swapaxes(-1, -2), 1, 2)
    scores = softcap * mx.tanh(scores * attention.scale / softcap)
    if seen is not None:
        scores = mx.where(seen, scores, mx.finfo(mx.float32).min)
    # MLX adds the mask to scores of its own: of no queries, it is all the scores.
    output = mx.fast.scaled_dot_product_attention(
        mx.zeros_like(wide_queries),
        wide_keys,
        wide_values,
        scale=1.0,
        mask=scores,
        sinks=None if attention.sinks is None else attention.sinks.astype(mx.float32),
    )
    return output.astype(queries.dtype)


def by_row(
    queries: mx.array,
    metadata: AttentionMetadata,
    dim: int,
    attend_row: Callable[[int, slice], mx.array],
) -> mx.array:
    """The outputs of all sequences, [B, q_heads, S, dim]. `attend_row(row, own)` is that of the
    valid tokens of a sequence's step, [1, q_heads, tokens, dim]."""
    _, heads, count, _ = queries.shape
    outputs = [
        _with_padding(attend_row(row, slice(own.start, own.stop)), own, count)
        if own
        else mx.zeros((1, heads, count, dim), dtype=queries.dtype)
        for row, own in enumerate(metadata.valid_tokens(count))
    ]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _with_padding(output: mx.array, own: range, count: int) -> mx.array:
    """Pad the outputs of valid tokens with zeros to `count` tokens."""
    if len(own) == count:
        return output
    return mx.pad(output, [(0, 0), (0, 0), (own.start, count - own.stop), (0, 0)])


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
