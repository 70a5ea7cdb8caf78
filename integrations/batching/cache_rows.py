"""Takes prompt caches of some sequences out of those of a batch, joins them without a copy of
pages, and computes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.unpaged_caches import is_list, leaves, paged_caches


def selected(caches: list[Any], rows: list[int]) -> list[Any]:
    """The prompt cache of these sequences of a batch, in this order; empty if there are none."""
    return [_selected_in(cache, rows) for cache in caches] if rows else []


def joined(caches: list[Any], others: list[Any]) -> list[Any]:
    """The prompt cache of the sequences of both, either of which may be empty. It takes the place
    of the first one, which is changed."""
    for cache, other in zip(caches, others, strict=False):
        cache.extend(other)
    return caches or others


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


def put_back(caches: list[Any], others: list[Any]) -> None:
    """Let the prompt cache of a batch be what it has become where its rows were taken out and
    joined again."""
    for cache, other in zip(leaves(caches), leaves(others), strict=True):
        if isinstance(cache, PagedKVCache):
            cache.depend_on([other])
        else:
            vars(cache).clear()
            vars(cache).update(vars(other))


def compute(caches: list[Any]) -> None:
    """Compute the latest step of a prompt cache. It can still be undone: reading the `state` of
    caches with pages would close it."""
    mx.eval([each.state for each in leaves(caches) if not isinstance(each, PagedKVCache)])
    # The last layer's step computes those of the others.
    for cache in reversed(paged_caches(caches)):
        cache.compute()


def _selected_in(cache: Any, rows: list[int]) -> Any:
    if is_list(cache):
        return type(cache)(*[_selected_in(inner, rows) for inner in cache.caches])
    if isinstance(cache, PagedKVCache):  # A view: a copy is a fork.
        view = type(cache)(cache.pool, cache.layer, [cache.sequences[row] for row in rows])
        view.depend_on([cache])
        return view
    taken = copy.copy(cache)
    taken.filter(rows)
    return taken
