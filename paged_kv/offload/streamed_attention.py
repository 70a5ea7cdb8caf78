"""Attention of one sequence to keys and values that come piece by piece, so that not all of them
are in memory at a time.

The maximum of each query's scores and the sum of its weights so far are enough to add the next
piece: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import Attention

# Scores of a piece that are computed at a time, in float32.
SCORE_BYTES = 64 << 20
# Far below any score: where all of a piece is hidden, the next one makes its weights 0.
HIDDEN = -1e30


def tokens_at_once(heads: int, queries: int) -> int:
    """Tokens of a piece, so that the scores of so many queries to it stay small."""
    return max(1, SCORE_BYTES // (4 * heads * max(1, queries)))


def attend_streamed(
    queries: mx.array,
    pieces: Iterable[tuple[mx.array, mx.array]],
    length: int,
    attention: Attention,
) -> mx.array:
    """Attention [1, q_heads, S, v_dim] of the last S of `length` tokens, computed in float32.

    Args:
        queries: [1, q_heads, S, k_dim].
        pieces: keys [1, kv_heads, tokens, k_dim] and values [1, kv_heads, tokens, v_dim], in the
            order of tokens.
        length: tokens of the sequence.
        attention: see `Attention`; `read_tokens` is not asked.
    """
    count, first = queries.shape[2], 0
    grouped, maximum, total, sums = queries, mx.array(HIDDEN), mx.array(0.0), mx.array(0.0)
    position = mx.arange(length - count, length)[:, None]
    for keys, values in pieces:
        if not first:
            scaled = queries.astype(mx.float32) * attention.scale
            grouped = mx.unflatten(scaled, 1, (keys.shape[1], -1))
            if attention.sinks is not None:
                shape = (1, *grouped.shape[1:3], 1, 1)
                maximum = attention.sinks.astype(mx.float32).reshape(shape)
                total = mx.ones_like(maximum)
        scores = grouped @ keys[:, :, None].astype(mx.float32).swapaxes(-1, -2)
        if attention.softcap is not None:
            scores = attention.softcap * mx.tanh(scores / attention.softcap)
        seen = _seen(position, mx.arange(first, first + keys.shape[2]), attention)
        if seen is not None:
            scores = mx.where(seen, scores, HIDDEN)
        highest = mx.maximum(maximum, scores.max(axis=-1, keepdims=True))
        weights, kept = mx.exp(scores - highest), mx.exp(maximum - highest)
        total = total * kept + weights.sum(axis=-1, keepdims=True)
        sums = sums * kept + weights @ values[:, :, None].astype(mx.float32)
        maximum = highest
        mx.eval(maximum, total, sums)
        first += keys.shape[2]
    return mx.flatten(sums / total, 1, 2).astype(queries.dtype)


def _seen(position: mx.array, at: mx.array, attention: Attention) -> mx.array | None:
    """The mask of a piece, boolean [S, tokens]; None if nothing is hidden."""
    if not attention.hides_later:
        return None
    seen = at <= position
    return seen if attention.window is None else seen & (at > position - attention.window)
