"""The members of a cache that mlx-lm uses, one sequence at a time."""

import copy
import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from paged_kv import PagedKVCache, PagePool, PoolExhausted, Sequence

HEADS, DIM = 2, 16


def random_step(tokens: int, seed: int = 0, batch: int = 1) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((batch, HEADS, tokens, DIM), key=mx.random.key(seed))
    return keys, keys + 1


def new_caches(pool: PagePool) -> list[PagedKVCache]:
    sequence = Sequence(pool)
    return [PagedKVCache(pool, layer, [sequence]) for layer in range(pool.num_layers)]


@pytest.fixture
def pool() -> PagePool:
    return PagePool(2, max_bytes=8 << 20)


def contents(cache: PagedKVCache) -> Any:
    keys, values = cache.keys_and_values()
    return keys.tolist(), values.tolist()


def test_returns_what_a_kv_cache_returns(pool: PagePool) -> None:
    cache, stock = new_caches(pool)[0], KVCache()
    for tokens in (1, 254, 1, 1, 300, 2):
        step = random_step(tokens, seed=tokens)
        for ours, theirs in zip(
            cache.update_and_fetch(*step), stock.update_and_fetch(*step), strict=True
        ):
            assert isinstance(ours, mx.array)
            assert mx.array_equal(ours, theirs)
        assert (cache.offset, cache.size(), cache.empty()) == (stock.offset, stock.offset, False)


@pytest.mark.parametrize("tokens", [1, 2, 300])
@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("window_size", [None, 4, 500])
def test_masks_are_those_of_a_kv_cache(
    pool: PagePool, tokens: int, return_array: bool, window_size: int | None
) -> None:
    cache, stock = new_caches(pool)[0], KVCache()
    for _ in range(2):
        ours = cache.make_mask(tokens, return_array=return_array, window_size=window_size)
        theirs = stock.make_mask(tokens, return_array=return_array, window_size=window_size)
        if isinstance(theirs, mx.array):
            assert isinstance(ours, mx.array)
            assert mx.array_equal(ours, theirs)
        else:
            assert ours == theirs
        cache.update_and_fetch(*random_step(7))
        stock.update_and_fetch(*random_step(7))


def test_offset_is_a_number_that_is_not_shared(pool: PagePool) -> None:
    cache = new_caches(pool)[0]
    cache.update_and_fetch(*random_step(5))
    before = cache.offset
    cache.update_and_fetch(*random_step(1))
    assert (before, cache.offset) == (5, 6)


def test_an_empty_cache_is_true_and_empty(pool: PagePool) -> None:
    cache = new_caches(pool)[0]
    assert cache
    assert cache.empty()
    assert (cache.offset, cache.nbytes) == (0, 0)
    mx.eval(cache.state)


def test_trim_returns_what_it_took_and_frees_blocks_with_the_last_layer(pool: PagePool) -> None:
    first, second = new_caches(pool)
    for cache in (first, second):
        cache.update_and_fetch(*random_step(600))
    assert first.trim(100) == 100
    assert pool.stats().blocks_used == 3
    assert second.trim(100) == 100
    assert pool.stats().blocks_used == 2
    assert [cache.trim(1000) for cache in (first, second)] == [500, 500]
    assert pool.stats().blocks_used == 0
    assert first.empty()


def test_writes_after_trim_take_the_place_of_what_was_trimmed(pool: PagePool) -> None:
    cache, stock = new_caches(pool)[0], KVCache()
    for each in (cache, stock):
        each.update_and_fetch(*random_step(300))
        each.trim(50)
        each.update_and_fetch(*random_step(20, seed=1))
    assert mx.array_equal(cache.keys, stock.keys_and_values()[0])


def test_a_fork_shares_all_pages_until_one_of_the_two_writes(pool: PagePool) -> None:
    original = new_caches(pool)
    for cache in original:
        cache.update_and_fetch(*random_step(300))
    before = contents(original[0])
    fork = copy.deepcopy(original)
    assert (pool.stats().blocks_used, pool.stats().blocks_shared) == (2, 2)

    fork[0].update_and_fetch(*random_step(5, seed=1))
    fork[1].update_and_fetch(*random_step(5, seed=1))
    stats = pool.stats()
    assert (stats.blocks_used, stats.blocks_shared, stats.cow_copies) == (3, 1, 1)
    assert contents(original[0]) == before
    assert fork[0].keys[..., :300, :].tolist() == before[0]


def test_a_fork_made_before_trim_keeps_what_the_original_writes_over(pool: PagePool) -> None:
    original = new_caches(pool)
    for cache in original:
        cache.update_and_fetch(*random_step(300))
    fork = copy.deepcopy(original)
    before = contents(fork[1])
    for cache in original:
        cache.trim(40)
        cache.update_and_fetch(*random_step(10, seed=2))
    assert contents(fork[1]) == before


def test_layers_copied_one_by_one_share_a_fork(pool: PagePool) -> None:
    original = new_caches(pool)
    for cache in original:
        cache.update_and_fetch(*random_step(10))
    forks = [[copy.deepcopy(cache) for _ in range(2)] for cache in original]
    (first_a, first_b), (second_a, second_b) = forks
    assert first_a.sequences[0] is second_a.sequences[0]
    assert first_b.sequences[0] is second_b.sequences[0]
    assert first_a.sequences[0] is not first_b.sequences[0]


def test_a_layer_does_not_get_a_fork_from_before_the_last_write(pool: PagePool) -> None:
    first, second = new_caches(pool)
    for cache in (first, second):
        cache.update_and_fetch(*random_step(10))
    early = copy.deepcopy(first)
    for cache in (first, second):
        cache.update_and_fetch(*random_step(1, seed=3))
    late = copy.deepcopy(second)
    assert (early.offset, late.offset) == (10, 11)


def test_a_layer_does_not_get_a_fork_from_before_a_trim(pool: PagePool) -> None:
    first, second = new_caches(pool)
    for cache in (first, second):
        cache.update_and_fetch(*random_step(10))
    early = copy.deepcopy(first)
    for cache in (first, second):
        cache.trim(4)
    late = copy.deepcopy(second)
    assert (early.offset, late.offset) == (10, 6)


def test_nbytes_counts_pages_and_layers_sum_to_the_sequence(pool: PagePool) -> None:
    caches = new_caches(pool)
    for cache in caches:
        cache.update_and_fetch(*random_step(300))
    page_bytes = 2 * HEADS * 256 * DIM * 4
    assert [cache.nbytes for cache in caches] == [2 * page_bytes, 2 * page_bytes]
    assert sum(cache.nbytes for cache in caches) == pool.stats().bytes_active


def test_what_is_assigned_to_keys_is_computed_with_the_next_write(pool: PagePool) -> None:
    cache = new_caches(pool)[0]
    cache.update_and_fetch(*random_step(3))
    before = contents(cache)
    cache.keys = mx.depends(cache.keys, mx.array(1.0))
    cache.values = mx.depends(cache.values, mx.array(2.0))
    mx.eval(cache.state)
    assert contents(cache) == before
    cache.update_and_fetch(*random_step(2, seed=1))
    assert cache.keys[..., :3, :].tolist() == before[0]
    assert cache.state.keys() == new_caches(pool)[0].state.keys()
    # Computed arrays take memory.
    assigned = mx.zeros(1 << 22) + 1
    cache.keys = mx.depends(cache.keys, assigned)
    memory = mx.get_active_memory()
    cache.update_and_fetch(*random_step(1))
    mx.eval(cache.state)
    assert mx.get_active_memory() - memory > assigned.nbytes // 2


def test_returned_arrays_keep_their_contents_after_later_writes(pool: PagePool) -> None:
    cache = new_caches(pool)[0]
    keys, _ = cache.update_and_fetch(*random_step(3))
    expected = random_step(3)[0]
    cache.trim(3)
    cache.update_and_fetch(*random_step(3, seed=9))
    assert mx.array_equal(keys, expected)


def test_other_geometry_is_refused_and_changes_nothing(pool: PagePool) -> None:
    cache = new_caches(pool)[1]
    cache.update_and_fetch(*random_step(5))
    before = contents(cache)
    bad = [
        (random_step(1)[0].astype(mx.float16), random_step(1)[1].astype(mx.float16)),
        (random_step(1)[0][:, :1], random_step(1)[1][:, :1]),
        (random_step(1)[0][..., :8], random_step(1)[1]),
        (random_step(1)[0], random_step(2)[1]),
        (random_step(1)[0][0], random_step(1)[1][0]),
        random_step(1, batch=2),
    ]
    for keys, values in bad:
        with pytest.raises(ValueError, match=r"layer 1|keys and values must") as error:
            cache.update_and_fetch(keys, values)
        assert "got" in str(error.value)
        assert contents(cache) == before
    with pytest.raises(ValueError, match=r"layer 1 expects \(2, 16\) float32, got .* float16"):
        cache.update_and_fetch(*bad[0])
    pool.check()


def test_a_dtype_that_pages_cannot_hold_is_refused(pool: PagePool) -> None:
    keys = mx.ones((1, 1, 1, 4), dtype=mx.int32)
    with pytest.raises(ValueError, match=r"'fp16' holds float16.*got .*int32"):
        new_caches(pool)[0].update_and_fetch(keys, keys)


@pytest.mark.parametrize("count", [-1, -300])
def test_negative_trim_is_refused(pool: PagePool, count: int) -> None:
    cache = new_caches(pool)[0]
    cache.update_and_fetch(*random_step(5))
    with pytest.raises(ValueError, match=f"not negative, got {count}$"):
        cache.trim(count)
    assert cache.offset == 5


@pytest.mark.parametrize("bits", [2, 3, 5, 16])
def test_bits_that_no_page_has_are_refused(pool: PagePool, bits: int) -> None:
    with pytest.raises(ValueError, match=f"kv_bits must be 4 or 8 with paged caches, got {bits}"):
        new_caches(pool)[0].to_quantized(bits=bits)


def test_reading_before_writing_is_refused(pool: PagePool) -> None:
    with pytest.raises(ValueError, match="layer 0 has no keys and values yet"):
        new_caches(pool)[0].keys_and_values()


def test_writing_no_tokens_changes_nothing(pool: PagePool) -> None:
    cache = new_caches(pool)[0]
    cache.update_and_fetch(*random_step(5))
    keys, _ = cache.update_and_fetch(*random_step(0))
    assert keys.shape == (1, HEADS, 5, DIM)
    assert cache.offset == 5


def test_exhaustion_changes_nothing_and_names_the_knob(pool: PagePool) -> None:
    caches = new_caches(pool)
    for cache in caches:
        cache.update_and_fetch(*random_step(300))
    before, stats = contents(caches[0]), pool.stats()
    with pytest.raises(PoolExhausted, match="raise max_bytes") as error:
        caches[0].update_and_fetch(*random_step(200_000))
    assert error.value.needed > error.value.free
    assert error.value.budget == 8 << 20
    assert contents(caches[0]) == before
    after = pool.stats()
    assert (after.blocks_used, after.bytes_mapped) == (stats.blocks_used, stats.bytes_mapped)
    assert after.allocation_failures == 1
    pool.check()


def test_exhaustion_in_the_first_step_undoes_it_in_every_layer() -> None:
    """The second layer turns out larger than the first, so only now the pool knows that it does not
    fit."""
    pool = PagePool(2, max_bytes=1 << 20)
    first, second = new_caches(pool)
    first.update_and_fetch(*random_step(300))
    wide = mx.ones((1, 64, 300, 32))
    with pytest.raises(PoolExhausted):
        second.update_and_fetch(wide, wide)
    assert (first.offset, second.offset) == (0, 0)
    assert pool.stats().blocks_used == 0
    pool.check()


def test_pages_follow_when_slabs_are_compacted() -> None:
    pool = PagePool(2, max_bytes=32 << 20)
    sequences = [new_caches(pool) for _ in range(6)]
    for at in range(4):
        for number, caches in enumerate(sequences):
            for cache in caches:
                cache.update_and_fetch(*random_step(250, seed=10 * number + at))
    expected = [[contents(cache) for cache in caches] for caches in sequences]
    del sequences[1:4], expected[1:4], caches, cache
    gc.collect()
    mapped = pool.stats().bytes_mapped
    assert pool.compact().blocks_moved > 0
    pool.check()
    assert pool.stats().bytes_mapped < mapped
    assert [[contents(cache) for cache in caches] for caches in sequences] == expected
    assert pool.compact().blocks_moved == 0


def test_blocks_are_freed_when_the_collector_runs_in_the_middle_of_a_step(pool: PagePool) -> None:
    """The collector frees a dropped cache in a reference cycle while another cache maps a slab."""
    doomed: Any = new_caches(pool)
    for cache in doomed:
        cache.update_and_fetch(*random_step(300))
    doomed.append(doomed)
    survivor = new_caches(pool)
    group = pool.groups[0]
    map_slab = group.allocator._map_slab

    def collect_and_map(slab: int, pages: int, page_format: str) -> None:
        gc.collect()
        map_slab(slab, pages, page_format)

    group.allocator._map_slab = collect_and_map
    del doomed, cache
    for cache in survivor:
        cache.update_and_fetch(*random_step(2000))
    pool.check()
    assert pool.stats().blocks_used == 8
    assert mx.array_equal(survivor[0].keys, random_step(2000)[0])


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_KV_BACKEND", "abacus")
    with pytest.raises(ValueError, match="must be one of plain, native, metal, cuda, got 'abacus'"):
        PagePool(1)


def test_default_budget_is_stated(pool: PagePool) -> None:
    stats = PagePool(1).stats()
    assert 0 < stats.bytes_budget < 1 << 50
    assert stats.as_dict()["bytes_budget"] == stats.bytes_budget
