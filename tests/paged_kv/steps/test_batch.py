"""The layers of a prompt cache share one batch, and the steps of it."""

import copy
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
