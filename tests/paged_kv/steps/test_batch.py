"""The layers of a prompt cache share one batch, and the steps of it."""

import copy
from collections.abc import Callable

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool
from paged_kv.steps.progress import Padding
from tests.support.arrays import normal
from tests.support.layer_caches import caches_of


def write(layers: list[PagedKVCache], rows: int, tokens: int) -> None:
    keys = normal((rows, 2, tokens, 16), mx.float32, 0)
    for cache in layers:
        cache.update_and_fetch(keys, keys + 1)


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
    operation: Callable[[PagedKVCache, PagedKVCache], PagedKVCache | None],
) -> None:
    pool = PagePool(2, max_bytes=1 << 24)
    layers, others = caches_of(pool, 2), caches_of(pool)
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


def test_a_wide_batch_is_narrowed_only_while_it_is_new() -> None:
    (cache,) = caches_of(PagePool(1, max_bytes=1 << 24))
    wide = cache.batch.widened(2)
    assert wide.narrowed() is cache.batch
    wide.sequences[1].prepare(0, Padding(left=3))
    assert wide.narrowed() is wide
