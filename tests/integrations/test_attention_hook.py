"""When attention reads pages, and when it must not."""

import logging
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, Sequence
from paged_kv.integrations.attention_hook import paged_attention
from tests.support.generation import greedy
from tests.support.zoo import small_model

HEADS, DIM, SCALE = 2, 16, 0.25
pytestmark = pytest.mark.usefixtures("hooked")


@pytest.fixture
def pool() -> PagePool:
    return PagePool(1, max_bytes=8 << 20, name="test")


@pytest.fixture
def cache(pool: PagePool) -> PagedKVCache:
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    cache.update_and_fetch(normal(1, 10), normal(2, 10))
    return cache


def normal(seed: int, tokens: int, heads: int = HEADS) -> mx.array:
    return mx.random.normal((1, heads, tokens, DIM), key=mx.random.key(seed))


def attended(cache: PagedKVCache, queries: mx.array, arrays: list[Any], mask: Any) -> int:
    """Compare with mlx-lm's attention over ordinary arrays; returns the number of gathers.

    They are counted when keys and values are dropped, so these are taken out of their list.
    """
    keys, values = arrays
    arrays.clear()
    plain = mx.array(keys), mx.array(values)
    plain_mask = mx.array(mask) if isinstance(mask, mx.array) else mask
    expected = mx.fast.scaled_dot_product_attention(queries, *plain, scale=SCALE, mask=plain_mask)
    before = cache.pool.stats().gather_fallbacks
    found = paged_attention(queries, keys, values, cache, SCALE, mask)
    assert mx.abs(found - expected).max() < 1e-6
    del keys, values
    return cache.pool.stats().gather_fallbacks - before


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("tokens", [1, 3])
def test_masks_that_the_cache_made_are_read_from_pages(
    cache: PagedKVCache, window: int | None, tokens: int
) -> None:
    for return_array in (False, True):
        mask = cache.make_mask(tokens, return_array=return_array, window_size=window)
        arrays = list(cache.update_and_fetch(normal(3, tokens), normal(4, tokens)))
        assert attended(cache, normal(5, tokens, 4), arrays, mask) == 0
        cache.trim(tokens)


def test_no_mask_hides_nothing(cache: PagedKVCache) -> None:
    arrays = list(cache.update_and_fetch(normal(3, 3), normal(4, 3)))
    assert attended(cache, normal(5, 3), arrays, None) == 0


@pytest.mark.parametrize("dtype", [mx.bool_, mx.float32])
def test_masks_of_the_models_own_making_are_honoured(cache: PagedKVCache, dtype: mx.Dtype) -> None:
    arrays = cache.update_and_fetch(normal(3, 3), normal(4, 3))
    visible = mx.array([[key % 2 == 0 for key in range(13)]] * 3)
    mask = visible if dtype == mx.bool_ else mx.where(visible, 0.0, -1e9)
    keys, values = arrays
    del arrays
    expected = mx.fast.scaled_dot_product_attention(
        normal(5, 3), mx.array(keys), mx.array(values), scale=SCALE, mask=mask
    )
    found = paged_attention(normal(5, 3), keys, values, cache, SCALE, mask)
    assert mx.abs(found - expected).max() < 1e-6
    del keys, values
    assert cache.pool.stats().gather_fallbacks == 2  # With the pages that the fixture read.


def test_a_mask_of_another_step_is_not_taken_for_this_ones(cache: PagedKVCache) -> None:
    mask = cache.make_mask(3, return_array=True)
    cache.update_and_fetch(normal(6, 1), normal(7, 1))
    assert isinstance(mask, mx.array)
    with pytest.raises(ValueError, match="broadcast"):
        mx.eval(paged_attention(normal(5, 3), *cache.keys_and_values(), cache, SCALE, mask))


def test_what_a_model_does_to_keys_or_values_is_honoured(cache: PagedKVCache) -> None:
    """A latent used as both, scaled keys, and values of another layer: none of these are the pages'
    keys and values."""
    queries = normal(5, 1)
    keys, values = cache.update_and_fetch(normal(3, 1), normal(4, 1))
    for ours, theirs in ((keys, keys), (keys * 2, values), (keys, values[..., :8]), (values, keys)):
        expected = mx.fast.scaled_dot_product_attention(
            queries, mx.array(ours), mx.array(theirs), scale=SCALE
        )
        found = paged_attention(queries, ours, theirs, cache, SCALE, None)
        assert mx.abs(found - expected).max() < 1e-6


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_keys_cast_to_float32_are_read_from_pages(
    pool: PagePool, dtype: mx.Dtype, tokens: int
) -> None:
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    mask = cache.make_mask(tokens)
    keys, values = cache.update_and_fetch(
        normal(3, tokens).astype(dtype), normal(4, tokens).astype(dtype)
    )
    arrays = [keys.astype(mx.float32), values]
    del keys, values
    assert attended(cache, normal(5, tokens, 4), arrays, mask) == 0


def test_a_cast_of_keys_makes_the_output_float32(pool: PagePool) -> None:
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    queries, *step = [normal(seed, 1).astype(mx.float16) for seed in range(3)]
    keys, values = cache.update_and_fetch(*step)
    output = paged_attention(queries, keys.astype(mx.float32), values, cache, SCALE, None)
    assert output.dtype == mx.float32


def test_keys_cast_to_fewer_bits_are_gathered(cache: PagedKVCache) -> None:
    keys, values = cache.update_and_fetch(normal(3, 1), normal(4, 1))
    arrays = [keys.astype(mx.float16), values]
    del keys, values
    assert attended(cache, normal(5, 1), arrays, None) == 1


@pytest.mark.parametrize("tokens", [1, 3])
def test_tiled_heads_are_read_from_pages(cache: PagedKVCache, tokens: int) -> None:
    """Query heads of both tiles and of both heads of the pages."""
    mask = cache.make_mask(tokens)
    arrays = [
        mx.tile(each, [1, 2, 1, 1])
        for each in cache.update_and_fetch(normal(3, tokens), normal(4, tokens))
    ]
    assert attended(cache, normal(5, tokens, 8), arrays, mask) == 0


@pytest.mark.parametrize(
    "mask", [None, mx.arange(11) % 2 == 0], ids=["of the cache", "of the model"]
)
def test_other_tiles_are_gathered(cache: PagedKVCache, mask: mx.array | None) -> None:
    keys, values = cache.update_and_fetch(normal(3, 1), normal(4, 1))
    tiled = mx.tile(keys, (1, 2, 1, 1)), mx.tile(values, (1, 2, 1, 1))
    repeated = mx.repeat(keys, 2, axis=1), mx.repeat(values, 2, axis=1)
    queries = normal(5, 1, 8)
    for ours, theirs in (tiled, repeated, (tiled[0], repeated[1]), (repeated[0], tiled[1])):
        expected = mx.fast.scaled_dot_product_attention(
            queries, mx.array(ours), mx.array(theirs), scale=SCALE, mask=mask
        )
        found = paged_attention(queries, ours, theirs, cache, SCALE, mask)
        assert mx.abs(found - expected).max() < 1e-6


def test_a_model_that_calls_mlx_s_attention_reads_pages(cache: PagedKVCache) -> None:
    keys, values = cache.update_and_fetch(normal(3, 1), normal(4, 1))
    plain = mx.array(keys), mx.array(values)
    before = cache.pool.stats().gather_fallbacks
    found = mx.fast.scaled_dot_product_attention(normal(5, 1), keys, values, scale=SCALE)
    expected = mx.fast.scaled_dot_product_attention(normal(5, 1), *plain, scale=SCALE)
    assert mx.abs(found - expected).max() < 1e-6
    del keys, values
    assert cache.pool.stats().gather_fallbacks == before


def test_keys_changed_in_place_are_not_those_of_the_pages(cache: PagedKVCache) -> None:
    keys, values = cache.update_and_fetch(normal(3, 1), normal(4, 1))
    expected = mx.fast.scaled_dot_product_attention(
        normal(5, 1), mx.ones_like(keys), mx.array(values), scale=SCALE
    )
    keys[0] = mx.array(1.0)
    found = mx.fast.scaled_dot_product_attention(normal(5, 1), keys, values, scale=SCALE)
    assert mx.abs(found - expected).max() < 1e-6


def test_the_cache_that_is_passed_beside_does_not_matter(cache: PagedKVCache) -> None:
    arrays = cache.update_and_fetch(normal(3, 1), normal(4, 1))
    results = [
        paged_attention(normal(5, 1), *arrays, other, SCALE, None)
        for other in (cache, None, [cache, cache], PagedKVCache(cache.pool, 0, []))
    ]
    assert all(mx.array_equal(result, results[0]) for result in results)


def test_keys_of_one_step_and_values_of_another_are_gathered(cache: PagedKVCache) -> None:
    before = cache.pool.stats().gather_fallbacks
    arrays = [cache.keys_and_values()[0], cache.keys_and_values()[1]]
    attended(cache, normal(5, 1), arrays, None)
    assert cache.pool.stats().gather_fallbacks == before + 2


def test_pages_are_read_behind_a_compaction_that_moves_nothing(cache: PagedKVCache) -> None:
    arrays = list(cache.update_and_fetch(normal(3, 1), normal(4, 1)))
    assert cache.pool.compact().blocks_moved == 0
    assert attended(cache, normal(5, 1, 4), arrays, None) == 0


def test_arrays_that_are_no_pages_go_to_mlx_lms_own_attention() -> None:
    arguments = normal(5, 2), normal(1, 6), normal(2, 6)
    for mask in (None, "causal", mx.ones((2, 6), dtype=mx.bool_)):
        expected = mx.fast.scaled_dot_product_attention(*arguments, scale=SCALE, mask=mask)
        assert mx.array_equal(paged_attention(*arguments, None, SCALE, mask), expected)


def test_a_cache_is_made_without_a_look_through_all_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[str] = []

    class Watched(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            looked_at.append(name)
            return super().__getattribute__(name)

    factory = PagedCacheFactory(small_model("llama"))
    factory.make_cache()
    monkeypatch.setitem(sys.modules, "watched", Watched("watched"))
    factory.make_cache()
    factory.uninstall()
    assert "__dict__" not in looked_at
    with factory:
        assert "__dict__" in looked_at


@pytest.mark.slow
def test_a_gather_is_counted_each_time_and_reported_once_per_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = small_model("phi3small")
    factory = PagedCacheFactory(model)
    with caplog.at_level(logging.WARNING, logger="paged_kv"):
        greedy(model, [1, 2, 3], factory.make_cache(), 4)
    layers = {0, 1, 2} - factory.pool.attending
    # One step for the prompt without its last token, and one step each for that token and the next.
    assert factory.stats().gather_fallbacks == len(layers) * 6
    said = [record for record in caplog.records if "does not read pages" in record.message]
    assert len(said) == 1
    assert said[0].message.startswith("phi3small: attention of layer 0")
