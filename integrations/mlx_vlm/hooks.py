"""Replaces the functions of mlx-vlm that make prompt caches, for models with an installed factory.

`generate` and `stream_generate` call `make_prompt_cache`. `batch_generate` and the server build
their batches with `_make_cache`, which asks for each cache's class and knows only its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx.nn.layers.base import Module
from mlx_vlm.generate import ar
from mlx_vlm.models import cache as mlx_vlm_cache

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.unpaged_caches import is_list
from paged_kv.integrations.mlx_vlm.kv_bits import (
    maybe_quantize_kv_cache,
    require_no_kv_bits,
    stock_maybe_quantize,
)
from paged_kv.integrations.mlx_vlm.left_padded_cache import LeftPaddedCache
from paged_kv.integrations.prompt_cache_hook import Hooks, installed_factory
from paged_kv.integrations.rebinding import rebind

stock_make_prompt_cache: Callable[..., list[Any]] = mlx_vlm_cache.make_prompt_cache
_stock_make_batch: Callable[..., list[Any]] = ar._make_cache


def make_prompt_cache(model: Module, max_kv_size: int | None = None) -> list[Any]:
    """mlx-vlm's function of this name; a model's installed factory makes its caches instead."""
    factory = installed_factory(model)
    if factory is None:
        return stock_make_prompt_cache(model, max_kv_size)
    return factory.make_cache(max_kv_size)


def make_batch_cache(
    model: Module, left_padding: list[int], kv_bits: float | None = None, **options: Any
) -> list[Any]:
    """mlx-vlm's `_make_cache`: a prompt cache for a batch, one row for each number.

    Raises:
        ValueError: mlx-vlm is to quantise the caches, which are pages.
    """
    factory = installed_factory(model)
    if factory is None:
        return _stock_make_batch(model, left_padding, kv_bits=kv_bits, **options)
    require_no_kv_bits(kv_bits)
    rows = [factory.make_cache() for _ in left_padding]
    stock = _stock_make_batch(model, left_padding)
    return [_batch(list(row), own, left_padding) for own, *row in zip(stock, *rows, strict=True)]


def _batch(rows: list[Any], stock: Any, left_padding: list[int]) -> Any:
    """One layer of all rows: paged caches merged, and mlx-vlm's own in the place of others."""
    if is_list(stock):
        inner = zip(stock.caches, *(row.caches for row in rows), strict=True)
        return type(stock)(*(_batch(list(row), own, left_padding) for own, *row in inner))
    if not hasattr(rows[0], "merge") or not isinstance(rows[0], PagedKVCache):
        return stock
    merged = rows[0].merge(rows)
    if not any(left_padding):
        return merged
    padded = LeftPaddedCache(merged.pool, merged.layer, merged.sequences)
    padded.prepare(left_padding=left_padding)
    return padded


def _install() -> None:
    rebind(stock_make_prompt_cache, make_prompt_cache)
    rebind(_stock_make_batch, make_batch_cache)
    rebind(stock_maybe_quantize, maybe_quantize_kv_cache)


def _remove() -> None:
    rebind(make_prompt_cache, stock_make_prompt_cache)
    rebind(make_batch_cache, _stock_make_batch)
    rebind(maybe_quantize_kv_cache, stock_maybe_quantize)


MLX_VLM_HOOKS = Hooks(_install, _remove)
