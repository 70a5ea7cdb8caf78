"""Replaces mlx-lm's attention by one that reads pages, and operations of MLX that models apply to
keys and values around it.

Nearly all of mlx-lm's models call `mlx_lm.models.base.scaled_dot_product_attention`, most of them
through a name of their own. The replacement looks only at the keys and values and never at the
cache argument: models share one layer's keys with another, pass another layer's cache, or pass one
latent as both keys and values.

Each replaced operation calls the original. If an argument stands for pages, the result also says
how it came from them, so that the pages need not be gathered. Other arrays are not affected.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from paged_kv.integrations.model_hooks import Replacements
from paged_kv.integrations.states.layer_rows import GrowingArray
from paged_kv.steps.read import DependentArray, PagedKeys, PagedRead, PagedValues, depending
from paged_kv.steps.recognised_arrays import AttentionScores, PositionScores, TokenIndices

_stock_attention: Callable[..., mx.array] = base.scaled_dot_product_attention
_stock_fast_attention: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention


class _ThisThread(threading.local):
    """Whether a model of this thread has done more with keys and values than to call mlx-lm's
    attention."""

    prepares = False


this_thread = _ThisThread()


def depends(inputs: Any, dependencies: mx.array | Sequence[mx.array]) -> Any:
    """`mx.depends`, whose result a `PagedKVCache` takes without gathering its pages."""
    is_read = isinstance(inputs, PagedKeys | PagedValues | DependentArray)
    if not is_read or inputs.is_changed:
        return mx.depends(inputs, dependencies)
    this_thread.prepares = True
    added = [dependencies] if isinstance(dependencies, mx.array) else dependencies
    return depending(inputs, added)


def concatenate(arrays: Any, axis: int = 0, *, stream: Any = None) -> mx.array:
    """`mx.concatenate`, which tells a cache what a model appends to its rows."""
    if len(arrays) > 1 and isinstance(arrays[0], GrowingArray):
        arrays[0].grown(arrays, axis)
    return mx.concatenate(arrays, axis, stream=stream)


def where(condition: Any, x: Any, y: Any, /, *, stream: Any = None) -> mx.array:
    """`mx.where`, whose result still stands for scores if it hides some of them."""
    if type(x) is AttentionScores:
        return x.masked(condition, y)
    result = mx.where(condition, x, y, stream=stream)
    return x.masked(result, condition, y) if type(x) is PositionScores else result


def tile(array: Any, repetitions: Any, /, *, stream: Any = None) -> mx.array:
    """`mx.tile`, whose result still stands for pages if it repeats their heads."""
    result = mx.tile(array, repetitions, stream=stream)
    if not isinstance(array, PagedKeys | PagedValues):
        return result
    this_thread.prepares = True
    return array.tiled(result, repetitions)


def broadcast_to(a: Any, shape: Any, /, *, stream: Any = None) -> mx.array:
    """`mx.broadcast_to`, whose result may be recognised as indices of tokens."""
    return TokenIndices.among(mx.broadcast_to(a, shape, stream=stream), a)


def take_along_axis(
    a: mx.array, /, indices: mx.array, axis: int | None = -1, *, stream: Any = None
) -> mx.array:
    """`mx.take_along_axis`, which reads tokens from pages."""
    if isinstance(a, PagedKeys | PagedValues) and not a.is_changed:
        this_thread.prepares = True
        return a.taken_along(indices, axis)
    return mx.take_along_axis(a, indices, axis, stream=stream)


def expand_dims(a: mx.array, /, axis: Any, *, stream: Any = None) -> mx.array:
    """`mx.expand_dims`, whose result still stands for pages if it groups heads."""
    result = mx.expand_dims(a, axis, stream=stream)
    if not isinstance(a, PagedKeys | PagedValues):
        return result
    this_thread.prepares = True
    return a.grouped(result, axis)


def tanh(a: mx.array, /, *, stream: Any = None) -> mx.array:
    """`mx.tanh`, whose result still stands for scores with a softcap."""
    result = mx.tanh(a, stream=stream)
    return a.tanh(result) if type(a) is AttentionScores else result


def softmax(
    a: mx.array, /, axis: Any = None, *, precise: bool = False, stream: Any = None
) -> mx.array:
    """`mx.softmax`, whose result still stands for the weights of pages."""
    result = mx.softmax(a, axis, precise=precise, stream=stream)
    return a.softmax(result, axis) if type(a) is AttentionScores else result


def paged_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """`scaled_dot_product_attention`: over pages if keys and values stand for pages, else by
    mlx-lm's own function."""
    if not isinstance(keys, PagedKeys) or keys.is_changed:
        return _stock_attention(queries, keys, values, cache, scale, mask, sinks)
    if keys is values and type(mask) is PositionScores and sinks is None:
        output = _latent_attention(queries, keys.read, scale, mask)
        if output is not None:
            return output
        if not mask.is_changed:
            keys, mask = _gathered_latents(keys, mask)
            values = keys
    if isinstance(values, PagedValues) and not values.is_changed:
        if keys.read is values.read:
            if keys.is_as_held and values.is_as_held:
                output = keys.read.attend(queries, mask, scale=scale, sinks=sinks)
            else:
                output = _attention_to_prepared(queries, keys, values, mask, scale, sinks)
            if output is not None:
                return output
        keys, values = _gathered(keys, values)
    return _stock_attention(queries, keys, values, cache, scale, mask, sinks)


def fast_attention(
    q: mx.array,
    k: Any,
    v: Any,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **options: Any,
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`, for models that call it themselves."""
    is_paged = isinstance(k, PagedKeys) and isinstance(v, PagedValues)
    if is_paged and not (k.is_changed or v.is_changed or options):
        this_thread.prepares = True
        return paged_attention(q, k, v, None, scale, mask, sinks)
    return _stock_fast_attention(q, k, v, scale=scale, mask=mask, sinks=sinks, **options)


def _gathered(keys: PagedKeys, values: PagedValues) -> tuple[mx.array, mx.array]:
    """What the keys and values stand for, of one read or of two."""
    gathered_keys, gathered_values = keys.read.gather()
    if keys.read is not values.read:
        gathered_values = values.read.gather()[1]
    return keys.like_this(gathered_keys), values.like_this(gathered_values)


def _gathered_latents(keys: PagedKeys, scores: PositionScores) -> tuple[mx.array, mx.array]:
    """Latents and scores of gathered position keys, of one read or of two."""
    latents, position_keys = keys.read.gather()
    if scores.read is not keys.read:
        position_keys = scores.read.gather()[1]
    return keys.like_this(latents), scores.of_gathered(position_keys)


def _attention_to_prepared(
    queries: mx.array,
    keys: PagedKeys,
    values: PagedValues,
    mask: mx.array | str | None,
    scale: float,
    sinks: mx.array | None,
) -> mx.array | None:
    """Attention to keys and values that a model has cast or tiled. None if kernels cannot do it."""
    if keys.tiles != values.tiles or (sinks is not None and keys.tiles > 1):
        return None
    if mx.float32 in (keys.dtype, values.dtype):
        queries = queries.astype(mx.float32)
    tiles, heads = keys.tiles, keys.shape[1] // keys.tiles
    by_head = _heads_swapped(queries, tiles, heads)
    output = keys.read.attend(by_head, mask, scale=scale, sinks=sinks)
    return None if output is None else _heads_swapped(output, heads, tiles)


def _heads_swapped(array: mx.array, outer: int, inner: int) -> mx.array:
    """The array [B, q_heads, S, dim], its heads numbered by `inner` first instead of by `outer`.

    Kernels number a query's head by the head of the pages first. Tiled keys number it by the tile.
    """
    numbered: mx.array = mx.unflatten(array, 1, (outer, inner, -1))
    return numbered.swapaxes(1, 2).flatten(1, 3)


def _latent_attention(
    queries: mx.array, read: PagedRead, scale: float, scores: PositionScores
) -> mx.array | None:
    """Attention to latents that are both keys and values. None unless the scores that are added are
    of the same read, and fit the queries."""
    if scores.is_changed or scores.read is not read:
        return None
    if scores.dtype != queries.dtype or scores.shape[:3] != queries.shape[:3]:
        return None
    return read.attend(queries, scores.mask, scale=scale, position_queries=scores.queries)


ATTENTION = Replacements({_stock_attention: paged_attention})
"""For all models."""

OPERATIONS = Replacements(
    {
        _stock_fast_attention: fast_attention,
        mx.depends: depends,
        mx.concatenate: concatenate,
        mx.where: where,
        mx.tile: tile,
        mx.broadcast_to: broadcast_to,
        mx.take_along_axis: take_along_axis,
        mx.expand_dims: expand_dims,
        mx.tanh: tanh,
        mx.softmax: softmax,
    }
)
"""For models that do more with keys and values than to call mlx-lm's attention."""
