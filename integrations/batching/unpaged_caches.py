"""Separates the paged caches of a prompt cache from others: of recurrent layers, indexers and so
on."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from paged_kv.cache.paged_kv_cache import PagedKVCache


def paged_caches(prompt_cache: list[Any]) -> list[PagedKVCache]:
    """The paged caches, in order."""
    return [cache for cache in leaves(prompt_cache) if isinstance(cache, PagedKVCache)]


def unpaged_caches(prompt_cache: list[Any]) -> list[Any]:
    """Copies of the caches that are not paged, in order."""
    others = [cache for cache in leaves(prompt_cache) if not isinstance(cache, PagedKVCache)]
    return copy.deepcopy(others)


def with_unpaged(prompt_cache: list[Any], others: list[Any]) -> list[Any]:
    """A prompt cache with copies of `others` in the place of its caches that are not paged."""
    copies = iter(copy.deepcopy(others))
    return [_replaced(cache, copies) for cache in prompt_cache]


def _replaced(cache: Any, copies: Iterator[Any]) -> Any:
    if is_list(cache):
        return type(cache)(*[_replaced(inner, copies) for inner in cache.caches])
    return cache if isinstance(cache, PagedKVCache) else next(copies)


def is_list(cache: Any) -> bool:
    """Whether this is a `CacheList` of mlx-lm or mlx-vlm: several caches of one layer."""
    return isinstance(getattr(cache, "caches", None), tuple | list)


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches, and those in lists of caches, in order."""
    for cache in caches:
        if is_list(cache):
            yield from leaves(cache.caches)
        else:
            yield cache


def frozen(cache: Any) -> Any:
    """A copy of a cache that stays as it is: MLX's arrays never change."""
    copied = copy.copy(cache)
    for name, value in vars(cache).items():
        if type(value) in (list, dict, set):
            vars(copied)[name] = value.copy()
    return copied
