"""Reads prompt caches, and cuts and joins those of batches without a copy of pages.

A prompt cache has a cache for each layer: of pages, of recurrent states and so on, or a list of
these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.cache.paged_kv_cache import PagedKVCache


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


def replaced(cache: Any, change: Callable[[Any], Any]) -> Any:
    """What `change` makes of a cache; of a list, a list of what it makes of those in it."""
    if is_list(cache):
        return type(cache)(*[replaced(inner, change) for inner in cache.caches])
    return change(cache)


def paged_caches(prompt_cache: list[Any]) -> list[PagedKVCache]:
    return [cache for cache in leaves(prompt_cache) if isinstance(cache, PagedKVCache)]


def first_paged(prompt_cache: list[Any]) -> PagedKVCache | None:
    """The first paged cache; its sequences are those of all layers."""
    return next(iter(paged_caches(prompt_cache)), None)


def unpaged_caches(prompt_cache: list[Any]) -> list[Any]:
    """Copies of the caches that are not paged, in order."""
    others = [cache for cache in leaves(prompt_cache) if not isinstance(cache, PagedKVCache)]
    return copy.deepcopy(others)


def with_unpaged(prompt_cache: list[Any], others: list[Any]) -> list[Any]:
    """A prompt cache with copies of `others` in the place of its caches that are not paged."""
    copies = iter(copy.deepcopy(others))

    def change(cache: Any) -> Any:
        return cache if isinstance(cache, PagedKVCache) else next(copies)

    return [replaced(cache, change) for cache in prompt_cache]


def frozen(cache: Any) -> Any:
    """A copy of a cache that stays as it is: MLX's arrays never change."""
    copied = copy.copy(cache)
    for name, value in vars(cache).items():
        if type(value) in (list, dict, set):
            vars(copied)[name] = value.copy()
    return copied


def selected(caches: list[Any], rows: list[int]) -> list[Any]:
    """The prompt cache of these sequences of a batch, in this order; empty if there are none."""
    return [replaced(cache, partial(_selected_in, rows)) for cache in caches] if rows else []


def _selected_in(rows: list[int], cache: Any) -> Any:
    if isinstance(cache, PagedKVCache):  # A view: a copy is a fork.
        view = type(cache)(cache.pool, cache.layer, [cache.sequences[row] for row in rows])
        view.depend_on([cache])
        return view
    taken = copy.copy(cache)
    taken.filter(rows)
    return taken


def joined(caches: list[Any], others: list[Any]) -> list[Any]:
    """The prompt cache of the sequences of both, either of which may be empty. It takes the place
    of the first one, which is changed."""
    for cache, other in zip(caches, others, strict=False):
        cache.extend(other)
    return caches or others


def put_back(caches: list[Any], others: list[Any]) -> None:
    """Let the prompt cache of a batch be what it has become where its rows were taken out and
    joined again."""
    for cache, other in zip(leaves(caches), leaves(others), strict=True):
        if isinstance(cache, PagedKVCache):
            cache.depend_on([other])
        else:
            vars(cache).clear()
            vars(cache).update(vars(other))


def copied_to_pages(prompt_cache: list[Any], make_cache: Callable[[], list[Any]]) -> list[Any]:
    """A copy of the prompt cache of one sequence. Of mlx-lm's `KVCache`s it is one of `make_cache`,
    with pages, if the pool has room: mlx-lm's batches of these take no caches with pages in."""
    if {type(each) for each in prompt_cache} == {KVCache}:
        paged = make_cache()
        if len(paged_caches(paged)) == len(paged) == len(prompt_cache):
            try:
                for cache, plain in zip(paged, prompt_cache, strict=True):
                    cache.extend(plain)
                    cache.filter(list(range(1, len(cache.sequences))))
            except PoolExhausted:
                pass
            else:
                return paged
    # Of pages this is a fork.
    return copy.deepcopy(prompt_cache)


def compute(caches: list[Any]) -> None:
    """Compute the latest step of a prompt cache. It can still be undone: reading the `state` of
    caches with pages would close it."""
    mx.eval([each.state for each in leaves(caches) if not isinstance(each, PagedKVCache)])
    # The last layer's step computes those of the others.
    for cache in reversed(paged_caches(caches)):
        cache.compute()
