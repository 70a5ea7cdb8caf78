"""Attention that reads pages, put in the place of mlx-lm's.

All but a few of mlx-lm's models call `mlx_lm.models.base.scaled_dot_product_attention`, most of
them through a name of their own. The replacement looks at what keys and values are, and never at
the cache that is passed beside them: models share one layer's keys with another, pass another
layer's cache, or one latent as both keys and values.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from paged_kv.integrations.rebinding import rebind
from paged_kv.sequences.paged_array import PagedKeys, PagedValues

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
    """What `scaled_dot_product_attention` computes, from pages where keys and values stand for
    some, and by mlx-lm's own function otherwise."""
    if isinstance(keys, PagedKeys) and isinstance(values, PagedValues):
        if keys.read is values.read:
            output = keys.read.attend(queries, mask, scale=scale, sinks=sinks)
            if output is not None:
                return output
            keys, values = keys.read.gather()
        else:
            keys, values = keys.read.gather()[0], values.read.gather()[1]
    return _stock_attention(queries, keys, values, cache, scale, mask, sinks)


def install_attention_hook() -> None:
    """Replace mlx-lm's attention in every module that has imported it; once is enough.

    For arrays that are not pages the replacement calls the original, so models that use other
    caches are not affected.
    """
    rebind(_stock_attention, paged_attention)
