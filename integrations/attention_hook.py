"""Replaces mlx-lm's attention by one that reads pages.

Nearly all of mlx-lm's models call `mlx_lm.models.base.scaled_dot_product_attention`, most of them
through a name of their own. The replacement looks only at the keys and values and never at the
cache argument: models share one layer's keys with another, pass another layer's cache, or pass one
latent as both keys and values.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from paged_kv.integrations.model_hooks import Replacements
from paged_kv.integrations.operation_hooks import OPERATIONS, prepared
from paged_kv.steps.read import PagedKeys, PagedRead, PagedValues
from paged_kv.steps.recognised_arrays import PositionScores

_stock_attention: Callable[..., mx.array] = base.scaled_dot_product_attention
_stock_fast_attention: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention


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
        prepared.by.add("attention")
        return paged_attention(q, k, v, None, scale, mask, sinks)
    return _stock_fast_attention(q, k, v, scale=scale, mask=mask, sinks=sinks, **options)


ATTENTION = Replacements({_stock_attention: paged_attention})
"""For all models."""

OPERATIONS_AROUND = Replacements({_stock_fast_attention: fast_attention, **OPERATIONS})
"""For models that do more with keys and values than to call mlx-lm's attention."""


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
