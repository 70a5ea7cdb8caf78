"""When attention reads pages, and when it must not."""

from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.integrations.attention_hook import paged_attention

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


def stock(queries: mx.array, keys: Any, values: Any, mask: Any = None) -> mx.array:
    """MLX's attention over ordinary arrays."""
    return mx.fast.scaled_dot_product_attention(
        queries,
        mx.array(keys),
        mx.array(values),
        scale=SCALE,
        mask=mx.array(mask) if isinstance(mask, mx.array) else mask,
    )


def assert_as_stock(
    cache: PagedKVCache, queries: mx.array, keys: Any, values: Any, mask: Any = None
) -> None:
    expected = stock(queries, keys, values, mask)
    found = paged_attention(queries, keys, values, cache, SCALE, mask)
    assert mx.abs(found - expected).max() < 1e-6


def attended(cache: PagedKVCache, queries: mx.array, arrays: list[Any], mask: Any) -> int:
    """Compare with MLX's attention; returns the number of gathers.

    They are counted when keys and values are dropped, so these are taken out of their list.
    """
    keys, values = arrays
    arrays.clear()
    before = cache.pool.stats().gather_fallbacks
    assert_as_stock(cache, queries, keys, values, mask)
    del keys, values
    return cache.pool.stats().gather_fallbacks - before


@pytest.mark.parametrize("dtype", [mx.bool_, mx.float32])
def test_masks_of_the_models_own_making_are_honoured(cache: PagedKVCache, dtype: mx.Dtype) -> None:
    arrays = list(cache.update_and_fetch(normal(3, 3), normal(4, 3)))
    visible = mx.array([[key % 2 == 0 for key in range(13)]] * 3)
    mask = visible if dtype == mx.bool_ else mx.where(visible, 0.0, -1e9)
    assert attended(cache, normal(5, 3), arrays, mask) == 1


def test_a_mask_of_another_step_is_not_taken_for_this_ones(cache: PagedKVCache) -> None:
    mask = cache.make_mask(3, return_array=True)
    cache.update_and_fetch(normal(6, 1), normal(7, 1))
    assert isinstance(mask, mx.array)
    with pytest.raises(ValueError, match="broadcast"):
        mx.eval(paged_attention(normal(5, 3), *cache.keys_and_values(), cache, SCALE, mask))


def test_what_a_model_does_to_keys_or_values_is_honoured(cache: PagedKVCache) -> None:
    """A latent used as both, scaled keys, values of another layer, and keys changed in place: none
    of these are the pages' keys and values."""
    queries = normal(5, 1)
    keys, values = cache.update_and_fetch(normal(3, 1), normal(4, 1))
    for ours, theirs in ((keys, keys), (keys * 2, values), (keys, values[..., :8]), (values, keys)):
        assert_as_stock(cache, queries, ours, theirs)
    changed = mx.ones_like(keys)
    keys[0] = mx.array(1.0)
    found = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE)
    assert mx.abs(found - stock(queries, changed, values)).max() < 1e-6


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
        assert_as_stock(cache, queries, ours, theirs, mask)


def test_keys_of_one_step_and_values_of_another_are_gathered(cache: PagedKVCache) -> None:
    before = cache.pool.stats().gather_fallbacks
    arrays = [cache.keys_and_values()[0], cache.keys_and_values()[1]]
    attended(cache, normal(5, 1), arrays, None)
    assert cache.pool.stats().gather_fallbacks == before + 2
