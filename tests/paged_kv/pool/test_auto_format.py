"""page_format="auto": the oldest pages are requantised when memory is short; limits hold."""

from typing import Any

import mlx.core as mx

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted
from paged_kv.cache.saved_state import page_formats
from tests.support.layer_caches import caches_of
from tests.support.zoo import small_model

HEAD = 32
LAYERS = 2
BLOCK_BYTES = LAYERS * 2 * 256 * HEAD * 2
TOKENS = [(7 * i * i + 3 * i + 1) % 97 for i in range(12 * 256)]


def write(caches: list[PagedKVCache], tokens: int) -> None:
    for cache in caches:
        numbers = mx.random.normal((2, 1, 1, tokens, HEAD)).astype(mx.float16)
        cache.update_and_fetch(numbers[0], numbers[1])


def fill(caches: list[PagedKVCache]) -> None:
    """Write pages until the pool is exhausted."""
    for _ in range(200):
        try:
            write(caches, 256)
        except PoolExhausted:
            return
        assert_within_budget(caches[0].pool)
    raise AssertionError("the pool was never exhausted")


def formats(caches: list[PagedKVCache]) -> list[str]:
    return page_formats(caches[0].pool, 0, caches[0].sequences[0])


def assert_within_budget(pool: PagePool) -> None:
    """This also holds for the memory itself."""
    pool.check()
    held = sum(
        slab.memory.nbytes
        for group in pool.groups
        for pages in group.pages.values()
        for slab in pages.slabs.values()
    )
    assert held == pool.stats().bytes_mapped == pool.budget.mapped <= pool.budget.max_bytes


def test_the_first_page_and_the_latest_stay_until_the_budget_is_full() -> None:
    pool = PagePool(LAYERS, page_format="auto", max_bytes=9 * BLOCK_BYTES)
    caches = caches_of(pool)
    while pool.stats().requantisations.get("q4", 0) < 3:
        write(caches, 256)
        assert_within_budget(pool)
        names = formats(caches)
        assert names[0] == "fp16"
        assert set(names[-4:]) == {"fp16"}
        # The oldest pages are the smallest.
        assert names[1:] == sorted(names[1:], key=["q4", "q8", "fp16"].index)
    fill(caches)
    names = formats(caches)
    assert names[0] != "fp16"
    assert len(names) > 18
    assert {cache.offset for cache in caches} == {256 * len(names)}


def test_rings_are_left_alone() -> None:
    model: Any = small_model("gemma3_text")
    factory = PagedCacheFactory(model, page_format="auto", max_bytes=18 * BLOCK_BYTES)
    cache = factory.make_cache()
    for at in range(0, 12 * 256, 1024):
        model(mx.array([TOKENS[at : at + 1024]]), cache=cache)
        assert_within_budget(factory.pool)
    windowed = [layer.layer in factory.pool.windows for layer in cache]
    assert set(windowed) == {True, False}
    for layer, has_window in zip(cache, windowed, strict=True):
        names = page_formats(factory.pool, layer.layer, layer.sequences[0])
        assert (set(names) == {"fp16"}) == has_window
