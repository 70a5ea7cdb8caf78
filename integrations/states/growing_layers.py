"""Finds out how the caches of a model grow that appends rows at rates of its own.

Such a cache keeps arrays [1, rows, dim] itself: a window of the latest tokens, rows that it appends
one for each group of tokens, and what the open group is computed from. A prompt of a length that no
rate divides tells which array is which, without a list of models. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.appended_rows import AppendedRows, RowInput

# Rates are powers of two, so that no group reaches into the next page.
_RATES = [1 << bits for bits in range(PAGE_SIZE.bit_length())]
_LEFT = 3  # tokens of the last group, by every rate of 4 and more


@dataclass(frozen=True)
class GrowingLayer:
    """What one part of such a cache holds; pages take its place.

    Attributes:
        rows: what it appends.
        window: how many of the latest rows a query sees, itself included; None if all.
    """

    rows: AppendedRows
    window: int | None = None


def appends_rows(cache: Any) -> bool:
    """Whether a cache has the methods of those that append rows."""
    return hasattr(cache, "update_window") and hasattr(cache, "window_size")


def growing_layers(model: Module, caches: Iterable[Any]) -> list[list[GrowingLayer]]:
    """The parts of each cache of a new prompt cache of a model.

    Raises:
        TypeError: a cache holds something else: it names what.
    """
    found = list(caches)
    if not found or not all(map(appends_rows, found)):
        return []
    longest = max(each.window_size for each in found)
    # More than a window, and more closed groups than an open one has tokens.
    num_tokens = -(-longest // PAGE_SIZE) * PAGE_SIZE + 4 * PAGE_SIZE + _LEFT
    run: Any = model
    run(mx.zeros((1, num_tokens), mx.int32), cache=found)
    return [_parts(each, num_tokens) for each in found]


def _parts(cache: Any, num_tokens: int) -> list[GrowingLayer]:
    """The parts of a cache that has taken so many tokens, its window first."""
    arrays = {name: each for name, each in vars(cache).items() if isinstance(each, mx.array)}
    window = arrays.pop("window")
    dim = window.shape[2]
    parts = [GrowingLayer(AppendedRows("window", 1, dim, window.dtype), cache.window_size)]
    rates = {
        name: rate
        for name, each in arrays.items()
        for rate in _RATES
        if each.shape[1] == num_tokens // rate
    }
    inputs = tuple(
        RowInput(name, each.shape[2], each.dtype)
        for name, each in arrays.items()
        if name not in rates and each.shape[1] in {num_tokens % rate for rate in rates.values()}
    )
    for name, rate in rates.items():
        rows = AppendedRows(name, rate, arrays[name].shape[2], arrays[name].dtype, inputs)
        inputs = ()  # kept once, for the first rows that are made of them
        parts.append(GrowingLayer(rows))
    known = {*rates, *(each.name for part in parts for each in part.rows.inputs)}
    if arrays.keys() - known:
        shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in arrays.items())
        raise TypeError(
            f"{type(cache).__name__} keeps {shapes} after {num_tokens} tokens, and paged_kv does "
            "not know how these grow: use the library's own caches for the model"
        )
    return parts
