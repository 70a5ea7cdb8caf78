"""Takes the tokens of caches without pages, such as mlx-lm's `KVCache`, into pages; and reads lists
and arrays of one integer per sequence, as mlx-lm gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx

from paged_kv.steps.batch import Batch
from paged_kv.steps.sequence import Sequence


def taken_in(cache: Any, batch: Batch, layer: int) -> list[Sequence]:
    """New sequences in the pool of a batch, which hold what a cache holds in a layer.

    The cache has keys [B, k_heads, T, k_dim] and values [B, v_heads, T, v_dim], or None before the
    first token, an `offset` for each sequence, and the `left_padding` of a batch.

    Raises:
        ValueError: it has no such arrays, its arrays do not fit the layer, or its first tokens are
            not in them any more.
        PoolExhausted: the pool's budget does not hold the tokens.
    """
    rows = list(_rows(cache))
    sequences = batch.newcomers(layer, len(rows))
    for sequence, (keys, values) in zip(sequences, rows, strict=True):
        if keys.shape[2]:
            written, _ = Batch.of(batch.pool, [sequence]).append(layer, keys, values)
            written.read.leave_unread()
    return sequences


def _rows(cache: Any) -> Iterator[tuple[mx.array, mx.array]]:
    """The keys and values [1, heads, tokens, dim] of each sequence of a cache."""
    kind = type(cache).__name__
    keys, values = getattr(cache, "keys", ()), getattr(cache, "values", ())
    rows = 1 if keys is None else len(keys)
    begins = integers(getattr(cache, "left_padding", [0] * rows))
    if keys is None and not any(begins):
        keys = values = mx.zeros((len(begins), 1, 0, 1))
    if not (isinstance(keys, mx.array) and isinstance(values, mx.array)):
        raise ValueError(
            f"a PagedKVCache can be batched with caches that have arrays of keys and values, as a "
            f"KVCache has, got a {kind}: make its cache with the factory's make_cache()"
        )
    offset = cache.offset
    counts = integers(offset) if isinstance(offset, mx.array) else [offset] * len(begins)
    for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        end = begin + count
        if begin < 0 or end > keys.shape[2]:
            raise ValueError(
                f"a PagedKVCache needs all tokens of a cache that it is batched with, got a {kind} "
                f"with the latest {keys.shape[2]} of {count}: compute its prompt with the "
                "factory's make_cache()"
            )
        yield keys[row : row + 1, :, begin:end], values[row : row + 1, :, begin:end]


def integers(numbers: Iterable[int] | mx.array) -> list[int]:
    """The numbers as a list."""
    listed: Any = numbers.tolist() if isinstance(numbers, mx.array) else numbers
    return list(listed)


def trim_counts(n: Iterable[int] | mx.array, batch: int) -> list[int]:
    """The numbers of tokens to trim from each of `batch` sequences.

    Raises:
        ValueError: there are not `batch` counts, or one is negative.
    """
    counts = integers(n)
    if len(counts) != batch:
        raise ValueError(f"trim needs one count per sequence ({batch}), got {len(counts)}")
    if min(counts, default=0) < 0:
        raise ValueError(f"trim needs counts of tokens that are not negative, got {min(counts)}")
    return counts
