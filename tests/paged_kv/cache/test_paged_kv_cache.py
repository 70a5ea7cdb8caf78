"""The members of a cache that mlx-lm uses, one sequence at a time."""

import copy
import itertools
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from paged_kv import PagedKVCache, PagePool, PoolExhausted
from tests.support.layer_caches import caches_of

HEADS, DIM = 2, 16


def random_step(tokens: int, seed: int = 0, batch: int = 1) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((batch, HEADS, tokens, DIM), key=mx.random.key(seed))
    return keys, keys + 1


@pytest.fixture
def pool() -> PagePool:
    return PagePool(2, max_bytes=8 << 20)


def write(caches: list[PagedKVCache], tokens: int, seed: int = 0) -> None:
    for cache in caches:
        cache.update_and_fetch(*random_step(tokens, seed))


def contents(cache: PagedKVCache) -> Any:
    keys, values = cache.keys_and_values()
    return keys.tolist(), values.tolist()


def test_returns_what_a_kv_cache_returns(pool: PagePool) -> None:
    cache, stock = caches_of(pool)[0], KVCache()
    assert cache
    assert (cache.offset, cache.nbytes, cache.empty()) == (0, 0, True)
    mx.eval(cache.state)
    for tokens in (1, 254, 1, 1, 300, 2):
        step = random_step(tokens, seed=tokens)
        for ours, theirs in zip(
            cache.update_and_fetch(*step), stock.update_and_fetch(*step), strict=True
        ):
            assert isinstance(ours, mx.array)
            assert mx.array_equal(ours, theirs)
        assert (cache.offset, cache.size(), cache.empty()) == (stock.offset, stock.offset, False)


def test_masks_are_those_of_a_kv_cache(pool: PagePool) -> None:
    for tokens, return_array, window in itertools.product(
        (1, 2, 300), (False, True), (None, 4, 500)
    ):
        cache, stock = caches_of(pool)[0], KVCache()
        for _ in range(2):
            ours = cache.make_mask(tokens, return_array=return_array, window_size=window)
            theirs = stock.make_mask(tokens, return_array=return_array, window_size=window)
            if isinstance(theirs, mx.array):
                assert isinstance(ours, mx.array)
                assert mx.array_equal(ours, theirs)
            else:
                assert ours == theirs
            cache.update_and_fetch(*random_step(7))
            stock.update_and_fetch(*random_step(7))


def test_a_fork_shares_all_pages_until_one_of_the_two_writes(pool: PagePool) -> None:
    original = caches_of(pool)
    write(original, 300)
    page_bytes = 2 * HEADS * 256 * DIM * 4
    assert [cache.nbytes for cache in original] == [2 * page_bytes] * 2
    before = contents(original[0])
    fork = copy.deepcopy(original)
    assert (pool.stats().blocks_used, pool.stats().blocks_shared) == (2, 2)
    write(fork, 5, seed=1)
    stats = pool.stats()
    assert (stats.blocks_used, stats.blocks_shared, stats.cow_copies) == (3, 1, 1)
    assert contents(original[0]) == before
    assert fork[0].keys[..., :300, :].tolist() == before[0]


def test_what_no_cache_takes_is_refused_and_changes_nothing(pool: PagePool) -> None:
    cache = caches_of(pool)[1]
    with pytest.raises(ValueError, match="layer 1 has no keys"):
        cache.keys_and_values()
    with pytest.raises(ValueError, match="int32"):
        cache.update_and_fetch(*[mx.ones((1, 1, 1, 4), dtype=mx.int32)] * 2)
    cache.update_and_fetch(*random_step(5))
    before = contents(cache)
    keys, values = random_step(1)
    bad = [
        (keys.astype(mx.float16), values.astype(mx.float16)),
        (keys[:, :1], values[:, :1]),
        (keys[..., :8], values),
        (keys, random_step(2)[1]),
        (keys[0], values[0]),
        random_step(1, batch=2),
    ]
    for step in bad:
        with pytest.raises(ValueError, match="got"):
            cache.update_and_fetch(*step)
        assert contents(cache) == before
    with pytest.raises(ValueError, match="not negative"):
        cache.trim(-1)
    unchanged, _ = cache.update_and_fetch(*random_step(0))
    assert unchanged.shape == (1, HEADS, 5, DIM)
    assert cache.offset == 5
    pool.check()


def test_exhaustion_in_the_first_step_undoes_it_in_every_layer() -> None:
    """The second layer turns out larger than the first, so only now the pool knows that it does not
    fit."""
    pool = PagePool(2, max_bytes=1 << 20)
    first, second = caches_of(pool)
    first.update_and_fetch(*random_step(300))
    wide = mx.ones((1, 64, 300, 32))
    with pytest.raises(PoolExhausted):
        second.update_and_fetch(wide, wide)
    assert (first.offset, second.offset) == (0, 0)
    assert pool.stats().blocks_used == 0
    pool.check()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_layers_that_are_copied_become_one_fork(copied: Any, pool: PagePool) -> None:
    caches = caches_of(pool)
    write(caches, 80)
    before = contents(caches[1])
    forks = [copied(cache) for cache in caches]
    assert len({*forks[0].sequences, *forks[1].sequences}) == 1
    assert [fork.trim(10) for fork in forks] == [10, 10]
    write(forks, 20, seed=1)
    assert [cache.offset for cache in (*caches, *forks)] == [80, 80, 90, 90]
    assert contents(caches[1]) == before


def test_a_layer_does_not_get_a_fork_from_before_the_last_write(pool: PagePool) -> None:
    first, second = caches_of(pool)
    for cache in (first, second):
        cache.update_and_fetch(*random_step(10))
    early = copy.deepcopy(first)
    for cache in (first, second):
        cache.update_and_fetch(*random_step(1, seed=3))
    late = copy.deepcopy(second)
    assert (early.offset, late.offset) == (10, 11)
