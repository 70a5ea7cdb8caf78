"""Replaces operations of MLX that models apply to a cache's keys and values around attention.

Each replacement calls the original. If an argument stands for pages, the result also says how it
came from them, so that the pages need not be gathered. Other arrays are not affected.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from paged_kv.integrations.states.layer_rows import GrowingArray
from paged_kv.steps.read import DependentArray, PagedKeys, PagedValues, depending
from paged_kv.steps.recognised_arrays import AttentionScores, PositionScores, TokenIndices

_stock_depends: Callable[..., Any] = mx.depends
_stock_concatenate: Callable[..., mx.array] = mx.concatenate
_stock_where: Callable[..., mx.array] = mx.where
_stock_tile: Callable[..., mx.array] = mx.tile
_stock_broadcast_to: Callable[..., mx.array] = mx.broadcast_to
_stock_take_along_axis: Callable[..., mx.array] = mx.take_along_axis
_stock_expand_dims: Callable[..., mx.array] = mx.expand_dims
_stock_tanh: Callable[..., mx.array] = mx.tanh
_stock_softmax: Callable[..., mx.array] = mx.softmax


class Prepared(threading.local):
    """What a thread's models have done with keys and values besides mlx-lm's attention.

    Attributes:
        by: names of operations.
    """

    def __init__(self) -> None:
        self.by: set[str] = set()


prepared = Prepared()


def depends(inputs: Any, dependencies: mx.array | Sequence[mx.array]) -> Any:
    """`mx.depends`, whose result a `PagedKVCache` takes without gathering its pages."""
    is_read = isinstance(inputs, PagedKeys | PagedValues | DependentArray)
    if not is_read or inputs.is_changed:
        return _stock_depends(inputs, dependencies)
    prepared.by.add("depends")
    added = [dependencies] if isinstance(dependencies, mx.array) else dependencies
    return depending(inputs, added)


def concatenate(arrays: Any, axis: int = 0, *, stream: Any = None) -> mx.array:
    """`mx.concatenate`, which tells a cache what a model appends to its rows."""
    if len(arrays) > 1 and isinstance(arrays[0], GrowingArray):
        arrays[0].grown(arrays, axis)
    return _stock_concatenate(arrays, axis, stream=stream)


def where(condition: Any, x: Any, y: Any, /, *, stream: Any = None) -> mx.array:
    """`mx.where`, whose result still stands for scores if it hides some of them."""
    if type(x) is AttentionScores:
        return x.masked(condition, y)
    result = _stock_where(condition, x, y, stream=stream)
    return x.masked(result, condition, y) if type(x) is PositionScores else result


def tile(array: Any, repetitions: Any, /, *, stream: Any = None) -> mx.array:
    """`mx.tile`, whose result still stands for pages if it repeats their heads."""
    result = _stock_tile(array, repetitions, stream=stream)
    if not isinstance(array, PagedKeys | PagedValues):
        return result
    prepared.by.add("tile")
    return array.tiled(result, repetitions)


def broadcast_to(a: Any, shape: Any, /, *, stream: Any = None) -> mx.array:
    """`mx.broadcast_to`, whose result may be recognised as indices of tokens."""
    return TokenIndices.among(_stock_broadcast_to(a, shape, stream=stream), a)


def take_along_axis(
    a: mx.array, /, indices: mx.array, axis: int | None = -1, *, stream: Any = None
) -> mx.array:
    """`mx.take_along_axis`, which reads tokens from pages."""
    if isinstance(a, PagedKeys | PagedValues) and not a.is_changed:
        prepared.by.add("take_along_axis")
        return a.taken_along(indices, axis)
    return _stock_take_along_axis(a, indices, axis, stream=stream)


def expand_dims(a: mx.array, /, axis: Any, *, stream: Any = None) -> mx.array:
    """`mx.expand_dims`, whose result still stands for pages if it groups heads."""
    result = _stock_expand_dims(a, axis, stream=stream)
    if not isinstance(a, PagedKeys | PagedValues):
        return result
    prepared.by.add("expand_dims")
    return a.grouped(result, axis)


def tanh(a: mx.array, /, *, stream: Any = None) -> mx.array:
    """`mx.tanh`, whose result still stands for scores with a softcap."""
    result = _stock_tanh(a, stream=stream)
    return a.tanh(result) if type(a) is AttentionScores else result


def softmax(
    a: mx.array, /, axis: Any = None, *, precise: bool = False, stream: Any = None
) -> mx.array:
    """`mx.softmax`, whose result still stands for the weights of pages."""
    result = _stock_softmax(a, axis, precise=precise, stream=stream)
    return a.softmax(result, axis) if type(a) is AttentionScores else result


OPERATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _stock_depends: depends,
    _stock_concatenate: concatenate,
    _stock_where: where,
    _stock_tile: tile,
    _stock_broadcast_to: broadcast_to,
    _stock_take_along_axis: take_along_axis,
    _stock_expand_dims: expand_dims,
    _stock_tanh: tanh,
    _stock_softmax: softmax,
}
"""The operations of MLX, with what takes their places in the modules of models that need it."""
