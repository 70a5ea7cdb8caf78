"""A saved cache continues in its own format."""

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.cache.saved_state import page_formats
from tests.support.layer_caches import caches_of
from tests.support.ring_batches import materialised

# Of two layers with one head of 64 numbers.
BLOCK = 2 * 2 * 256 * 64 * 2


@pytest.mark.parametrize("bits", [4, 8])
def test_tokens_to_come_get_pages_like_those_before(bits: int) -> None:
    pool = PagePool(1, max_bytes=1 << 24)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    step = mx.ones((1, 1, 300, 32))
    cache.update_and_fetch(step, step)
    cache.to_quantized(bits=bits)
    loaded = PagedKVCache.from_state(materialised(cache.state))
    loaded.update_and_fetch(step, step)
    assert page_formats(loaded.pool, 0, loaded.sequences[0]) == ["q8", "fp16", "fp16"]
    loaded.update_and_fetch(step, step)
    names = page_formats(loaded.pool, 0, loaded.sequences[0])
    assert names == ["q8", f"q{bits}", "fp16", "fp16"]


def test_pages_that_become_smaller_while_their_cache_is_loaded() -> None:
    """The pages of a layer that is loaded later are as small as those of the first."""
    pool = PagePool(2, max_bytes=13 * BLOCK, page_format="auto")
    tokens = mx.random.normal((2, 3, 1, 512, 64), key=mx.random.key(3)).astype(mx.float16)
    caches = caches_of(pool, 3)
    for cache in caches:
        cache.update_and_fetch(*tokens)
    saved = [materialised(cache.state) for cache in caches]
    for cache in caches:
        cache.trim(512)
    loads = [[PagedKVCache.from_state(state) for state in saved] for _ in range(3)]
    for layers in loads:
        named = [page_formats(pool, 0, sequence) for sequence in layers[0].sequences]
        assert {name for names in named for name in names} <= {"fp16", "q8", "q4"}
        for cache in layers:
            for held, given in zip((cache.keys, cache.values), tokens, strict=True):
                assert mx.all(mx.abs(held - given) < 0.13 * mx.abs(given).max())
    assert pool.stats().bytes_mapped <= pool.budget.max_bytes


def test_a_cache_that_was_loaded_and_emptied_is_not_loaded_into() -> None:
    pool = PagePool(2, max_bytes=1 << 24)
    caches = caches_of(pool)
    step = mx.ones((1, 1, 300, 32))
    for cache in caches:
        cache.update_and_fetch(step, step)
    saved = [materialised(cache.state) for cache in caches]
    first = [PagedKVCache.from_state(state) for state in saved]
    for cache in first:
        cache.trim(300)
    second = [PagedKVCache.from_state(state) for state in saved]
    assert [cache.offset for cache in first] == [0, 0]
    assert [cache.offset for cache in second] == [300, 300]
    assert second[0].sequences == second[1].sequences != first[0].sequences
