"""The layers of a prompt cache share one batch, and the steps of it."""

import copy
import gc
import weakref
from collections.abc import Callable

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from tests.support.arrays import normal

LAYERS = 2
Layers = list[PagedKVCache]


def new_layers(pool: PagePool, rows: int = 1) -> Layers:
    sequences = [Sequence(pool) for _ in range(rows)]
    return [PagedKVCache(pool, layer, sequences) for layer in range(LAYERS)]


def numbers(rows: int, tokens: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    keys = normal((rows, 2, tokens, 16), mx.float32, seed)
    return keys, keys + 1


def write(layers: Layers, rows: int, tokens: int, seed: int = 0) -> mx.array:
    keys, values = numbers(rows, tokens, seed)
    for cache in layers:
        cache.update_and_fetch(keys, values)
    return keys


@pytest.fixture
def pool() -> PagePool:
    return PagePool(LAYERS, max_bytes=1 << 24)


@pytest.mark.parametrize(
    "operation",
    [
        lambda cache, other: cache.filter([1]),
        lambda cache, other: cache.filter([1, 1, 0]),
        lambda cache, other: cache.extend(other),
        lambda cache, other: cache.extract(0),
        lambda cache, other: cache.merge([cache, other]),
        lambda cache, other: copy.deepcopy(cache),
    ],
    ids=["filter", "repeat", "extend", "extract", "merge", "copy"],
)
def test_layers_that_change_alike_share_a_batch_again(
    pool: PagePool, operation: Callable[[PagedKVCache, PagedKVCache], PagedKVCache | None]
) -> None:
    layers, others = new_layers(pool, 2), new_layers(pool)
    write(layers, 2, 5)
    write(others, 1, 3)
    changed = [
        operation(cache, other) or cache for cache, other in zip(layers, others, strict=True)
    ]
    batch = changed[0].batch
    assert changed[1].batch is batch
    first, second = (cache.make_mask(1) is not None for cache in changed)
    assert first == second
    step = batch.step
    write(changed, len(batch.sequences), 1)
    assert batch.step is step


def test_a_new_cache_that_takes_a_batch_gets_the_same_rows_in_all_layers(pool: PagePool) -> None:
    layers = new_layers(pool)
    keys = write(layers, 3, 5)
    assert layers[0].batch is layers[1].batch
    assert len(layers[0].sequences) == 3
    assert mx.array_equal(layers[1].keys, keys)


def test_a_batch_ends_with_its_caches_without_the_garbage_collector(pool: PagePool) -> None:
    gc.disable()
    try:
        layers = new_layers(pool, 2)
        write(layers, 2, 300)
        batch = weakref.ref(layers[0].batch)
        layers.clear()
        assert batch() is None
        assert pool.stats().blocks_used == 0
    finally:
        gc.enable()


def test_a_step_in_one_batch_closes_that_of_another(pool: PagePool) -> None:
    layers = new_layers(pool, 2)
    keys = write(layers, 2, 5)
    layers[0].make_mask(1)
    alone = [PagedKVCache(pool, cache.layer, cache.sequences[:1]) for cache in layers]
    more = write(alone, 1, 2, seed=1)
    assert mx.array(layers[0].offset).tolist() == [7, 5]
    last = write(layers, 2, 1, seed=2)
    assert alone[1].offset == 8
    expected = mx.concatenate([keys[:1], more, last[:1]], axis=2)
    assert mx.array_equal(alone[1].keys, expected)
    assert mx.array_equal(layers[1].keys[:1], expected)
