"""Batches of windowed and other caches, beside lists of the tokens that they must hold."""

import contextlib
import copy
import itertools
from collections import abc
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv import PagedKVCache, PagePool, PoolExhausted
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.pool.layer_kinds import Window
from tests.support.layer_caches import caches_of, ragged_step

KV_HEADS, Q_HEADS, DIM = 1, 2, 8
SCALE = DIM**-0.5
PAGE_BYTES = 2 * KV_HEADS * 256 * DIM * 4
# A token's number selects its keys, values and queries from these rows.
RANDOM = np.random.default_rng(7)
TABLE = RANDOM.standard_normal((6007, DIM), dtype=np.float32)
Floats = npt.NDArray[Any]


@dataclass(eq=False)
class Row:
    """The tokens that a sequence must hold, and the most that it ever held."""

    tokens: list[int] = field(default_factory=list)
    written: int = 0

    def add(self, tokens: abc.Sequence[int]) -> None:
        self.tokens += tokens
        self.written = max(self.written, len(self.tokens))

    def trim(self, count: int) -> None:
        del self.tokens[max(0, len(self.tokens) - count) :]
        self.written = self.written if self.tokens else 0

    def copy(self) -> "Row":
        return Row(list(self.tokens), self.written)

    def rollback(self, windows: abc.Sequence[Window]) -> int:
        shortest = [window.shortest_rollback(self.written) for window in windows]
        return max(0, len(self.tokens) - max(shortest))


def keys_of(tokens: abc.Sequence[int] | Floats, layer: int) -> Floats:
    return TABLE[(np.array(tokens, dtype=np.int64) * 3 + layer) % len(TABLE)]


def values_of(tokens: abc.Sequence[int], layer: int) -> Floats:
    return -keys_of(np.array(tokens, dtype=np.int64) + 11, layer)


def queries_of(tokens: abc.Sequence[int], layer: int) -> Floats:
    numbers = np.array(tokens, dtype=np.int64)
    return np.stack([keys_of(numbers + 5 + head, layer) for head in range(Q_HEADS)])


def dense(row: list[int], at: int, layer: int, window: int | None) -> Floats:
    """Attention [Q_HEADS, DIM] of the query of the token at a position, in float64."""
    seen = row[0 if window is None else max(0, at - window + 1) : at + 1]
    scores = queries_of(row[at : at + 1], layer)[:, 0].astype(np.float64) @ keys_of(seen, layer).T
    weights = np.exp(scores * SCALE - (scores * SCALE).max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    attended: Floats = weights @ values_of(seen, layer)
    return attended


def write(
    cache: PagedKVCache,
    rows: list[list[int]],
    steps: list[list[int]],
    lengths: list[int] | None = None,
) -> None:
    """One layer's part of a step, checked against `rows`, the sequences as they were before it."""
    layer, window = cache.layer, cache.pool.windows.get(cache.layer)
    count = len(steps[0])
    mask = cache.make_mask(count)
    keys = mx.array(np.stack([keys_of(step, layer) for step in steps])[:, None])
    values = mx.array(np.stack([values_of(step, layer) for step in steps])[:, None])
    queries = mx.array(np.stack([queries_of(step, layer) for step in steps]))
    read = cache.update_and_fetch(keys, values)
    found = np.asarray(paged_attention(queries, *read, cache, SCALE, mask))
    assert np.isfinite(found).all()
    held = [np.asarray(part) for part in read]
    for index, (row, step) in enumerate(zip(rows, steps, strict=True)):
        own = count if lengths is None else lengths[index]
        whole = row + step[:own]
        visible = len(whole) if window is None else min(len(whole), window.size - 1 + own)
        assert_ends_with(held, index, layer, whole[len(whole) - visible :], count - own)
        for at in {0, own // 2, own - 1, 32, 33, *range(own - 3, own)} & set(range(own)):
            expected = dense(whole, len(row) + at, layer, window.size if window else None)
            assert np.abs(found[index, :, at] - expected).max() < 1e-4, (index, at, layer)


def assert_ends_with(
    held: list[Floats], index: int, layer: int, tokens: list[int], padding: int = 0
) -> None:
    end = held[0].shape[2] - padding
    for part, expected in zip(held, (keys_of, values_of), strict=True):
        own = part[index, 0, end - len(tokens) : end]
        assert (own == expected(tokens, layer)).all(), f"row {index} of layer {layer}"
        assert (part[index, 0, end:] == 0).all()


def assert_holds(cache: PagedKVCache, rows: list[Row]) -> None:
    """Check that the tokens that the next step's first query sees are present."""
    held = [np.asarray(part) for part in cache.keys_and_values()]
    window = cache.pool.windows.get(cache.layer)
    for index, row in enumerate(rows):
        seen = len(row.tokens) if window is None else min(len(row.tokens), window.size - 1)
        tokens = row.tokens[len(row.tokens) - seen :]
        # Check that a step that ended with padding still reads as before.
        padding = cache.sequences[index].progress(cache.layer).padding.right
        assert_ends_with(held, index, cache.layer, tokens, padding)


@dataclass(eq=False)
class Batch:
    """A cache for each layer, and the expected content of each sequence."""

    layers: list[PagedKVCache]
    rows: list[Row]


def new_batch(pool: PagePool, rows: int = 1) -> Batch:
    return Batch(caches_of(pool, rows), [Row() for _ in range(rows)])


COUNTER = itertools.count(1, 6001)


def fresh_tokens(count: int, rows: int) -> list[list[int]]:
    return [list(range(first, first + count)) for first in itertools.islice(COUNTER, rows)]


def append(batch: Batch, count: int, lengths: list[int] | None = None) -> bool:
    """Take a step in every layer; returns False, with nothing changed, if the pool is exhausted."""
    steps = fresh_tokens(count, len(batch.rows))
    before = [row.tokens for row in batch.rows]
    try:
        with contextlib.nullcontext() if lengths is None else ragged_step(batch.layers, lengths):
            for cache in batch.layers:
                write(cache, before, steps, lengths)
    except PoolExhausted:
        return False
    for row, step, own in zip(batch.rows, steps, lengths or [count] * len(steps), strict=True):
        row.add(step[:own])
    return True


def fork(batch: Batch) -> Batch:
    return Batch(copy.deepcopy(batch.layers), [row.copy() for row in batch.rows])


def saved_and_loaded(batch: Batch) -> Batch:
    states = [cache.state for cache in batch.layers]
    kept = [materialised(state) for state in states]
    del states
    return Batch([PagedKVCache.from_state(s) for s in kept], [row.copy() for row in batch.rows])


def materialised(tree: Any) -> Any:
    """Copies all arrays: a view of a page would keep the page."""
    if isinstance(tree, dict):
        return {name: materialised(part) for name, part in tree.items()}
    if isinstance(tree, list):
        return [materialised(part) for part in tree]
    return mx.array(np.array(tree)) if isinstance(tree, mx.array) else tree
