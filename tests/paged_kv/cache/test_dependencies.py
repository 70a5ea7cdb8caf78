"""What a model makes a cache depend on is computed, and no pages are gathered for it."""

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.steps.recognised_arrays import placeholder

HEADS, DIM = 2, 32


@pytest.fixture(params=["fp16", "q8"])
def cache(request: pytest.FixtureRequest, hooked: None) -> PagedKVCache:
    pool = PagePool(1, page_format=request.param, max_bytes=8 << 20)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    cache.update_and_fetch(*step(1, 5))
    pool.group_of(0).record_second_step()
    return cache


def step(seed: int, tokens: int) -> tuple[mx.array, mx.array]:
    keys, values = mx.random.normal((2, 1, HEADS, tokens, DIM), key=mx.random.key(seed))
    return keys, values


def depend(cache: PagedKVCache, name: str, dependencies: Any) -> None:
    """What models do."""
    setattr(cache, name, mx.depends(getattr(cache, name), dependencies))


READERS: dict[str, Callable[[PagedKVCache], Any]] = {
    "state": lambda cache: cache.state,
    "keys": lambda cache: cache.keys,
    "values": lambda cache: cache.values,
    "next write": lambda cache: cache.update_and_fetch(*step(2, 1)),
    "copy": lambda cache: copy.deepcopy(cache).state,
    "extracted": lambda cache: cache.extract(0).state,
    "merged": lambda cache: cache.merge([cache]).state,
    "extended": lambda cache: extended(cache).state,
}


def extended(cache: PagedKVCache) -> PagedKVCache:
    batch = PagedKVCache(cache.pool, 0, [Sequence(cache.pool)])
    batch.extend(cache)
    return batch


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("reader", READERS)
def test_the_dependency_is_computed_by(cache: PagedKVCache, name: str, reader: str) -> None:
    mx.eval(READERS[reader](cache))
    depend(cache, name, [mx.array(1), placeholder((2,), mx.float32)])
    depend(cache, name, mx.array(2))
    with pytest.raises(RuntimeError, match="primitive"):
        mx.eval(READERS[reader](cache))


def test_values_assigned_later_leave_the_dependency_of_keys(cache: PagedKVCache) -> None:
    depend(cache, "keys", placeholder((2,), mx.float32))
    cache.values = mx.array(1)
    with pytest.raises(RuntimeError, match="primitive"):
        mx.eval(cache.state)


def test_a_dependency_and_a_look_cost_no_gather(cache: PagedKVCache) -> None:
    before = cache.pool.stats().gather_fallbacks
    assert cache.keys.shape == cache.values.shape == (1, HEADS, 5, DIM)
    for seed in range(3):
        depend(cache, "keys", mx.array(1))
        depend(cache, "keys", (mx.array(2), mx.array(3)))
        depend(cache, "values", mx.array(4))
        cache.update_and_fetch(*step(seed, 1))
        mx.eval(cache.state)
    # Those that the writes above return are counted when they are dropped.
    assert cache.pool.stats().gather_fallbacks == before + 3
