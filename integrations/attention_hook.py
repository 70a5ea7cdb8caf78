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

from paged_kv.integrations.operation_hooks import install_operation_hooks
from paged_kv.integrations.rebinding import rebind
from paged_kv.sequences.latent_arrays import PositionScores
from paged_kv.sequences.paged_array import PagedKeys, PagedRead, PagedValues

_stock_attention: Callable[..., mx.array] = base.scaled_dot_product_attention


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
    if isinstance(values, PagedValues) and not values.is_changed:
        if keys.read is values.read:
            output = keys.read.attend(queries, mask, scale=scale, sinks=sinks)
            if output is not None:
                return output
            keys, values = keys.read.gather()
        else:
            keys, values = keys.read.gather()[0], values.read.gather()[1]
    return _stock_attention(queries, keys, values, cache, scale, mask, sinks)


def install_attention_hook() -> None:
    """Replace mlx-lm's attention, and the operations around it, in every module that has them;
    repeated calls do nothing.

    For other arrays the replacements call the originals, so models with other caches are not
    affected.
    """
    rebind(_stock_attention, paged_attention)
    install_operation_hooks()


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
