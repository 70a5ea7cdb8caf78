"""Puts paged caches in the place of mlx-lm's in a prompt cache, and reads windows from mlx-lm's."""

from collections.abc import Callable
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from paged_kv.cache.chunked_kv_cache import PagedChunkedKVCache
from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.prompt_cache_hook import stock_make_prompt_cache
from paged_kv.pool.window import DEFAULT_WRITE_CHUNK, Window

# These models pair a layer's cache with one for an indexer's keys, whose arrays they read and
# replace themselves. Only the first cache of each pair holds keys and values for attention.
_INDEXER_MODELS = frozenset({"deepseek_v32", "glm_moe_dsa", "minimax_m3_vl"})


def model_file(model: Module) -> str:
    """The name of the model's file in mlx-lm, such as "llama"."""
    return type(model).__module__.rpartition(".")[2]


def replaced_layers(
    model: Module, paged: Callable[[Any], Any], max_kv_size: int | None = None
) -> list[Any]:
    """mlx-lm's prompt cache, with `paged(cache)` in the place of each cache that can be paged."""
    pairs_with_indexer = model_file(model) in _INDEXER_MODELS
    stock = stock_make_prompt_cache(model, max_kv_size)
    return [_replaced(cache, paged, pairs_with_indexer) for cache in stock]


def _replaced(cache: Any, paged: Callable[[Any], Any], pairs_with_indexer: bool) -> Any:
    if type(cache) in (KVCache, RotatingKVCache, ChunkedKVCache):
        return paged(cache)
    if type(cache) is CacheList:
        first, *rest = cache.caches
        if not pairs_with_indexer:
            rest = [_replaced(inner, paged, pairs_with_indexer) for inner in rest]
        return CacheList(_replaced(first, paged, pairs_with_indexer), *rest)
    return cache


def paged_class(cache: Any) -> type[PagedKVCache]:
    """The class of the paged cache that takes the place of one of mlx-lm's."""
    return PagedChunkedKVCache if isinstance(cache, ChunkedKVCache) else PagedKVCache


def window_of(cache: Any, write_chunk: int | None) -> Window | None:
    """The window of the layer of one of mlx-lm's caches that can be paged, if it has one.

    In a layer that attends by chunks, no query sees a token that is a chunk's length or more
    before it; the model's own mask hides the rest.

    Raises:
        ValueError: the cache holds only its sink tokens.
    """
    if isinstance(cache, ChunkedKVCache):
        size, sink_tokens = cache.chunk_size, 0
    elif isinstance(cache, RotatingKVCache):
        size, sink_tokens = cache.max_size - cache.keep, cache.keep
    else:
        return None
    if size < 1:
        raise ValueError(
            f"max_kv_size={cache.max_size} must be more than the {cache.keep} sink tokens, which "
            "are always kept"
        )
    chunk = min(DEFAULT_WRITE_CHUNK, size) if write_chunk is None else write_chunk
    return Window(size, chunk, sink_tokens)
