"""A pool's statistics count every byte, at any moment."""

import copy
import gc
import random
from collections import Counter
from threading import Event, Thread

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, PoolStats
from paged_kv.allocator.block_allocator import packed, unpacked
from paged_kv.monitor.publisher import view_pool
from paged_kv.pool.layer_kinds import Window
from paged_kv.prefix.prefix_cache import PrefixCache
from tests.support.invariants import assert_invariants, used_rows
from tests.support.layer_caches import caches_of

LAYERS = 3
WINDOW = Window(300, 64)
# Keys and values in float32, one head of 4 numbers.
TOKEN_BYTES = 2 * 4 * 4


def write(caches: list[PagedKVCache], count: int) -> None:
    numbers = mx.zeros((len(caches[0].sequences), 1, count, 4))
    for cache in caches:
        cache.update_and_fetch(numbers, numbers)


def ring_pool(max_bytes: int = 1 << 26) -> PagePool:
    """One layer that sees everything, and two with a window."""
    return PagePool(LAYERS, windows={1: WINDOW, 2: WINDOW}, max_bytes=max_bytes)


def test_one_sequence_by_hand() -> None:
    pool = ring_pool()
    caches = caches_of(pool)
    for count in (60, 64, 64, 64, 64, 64, 20):
        write(caches, count)
    full, windowed = pool.stats().groups
    # 400 tokens: two pages with 112 free slots.
    assert (full.layers, full.window, full.blocks_used) == (1, None, 2)
    assert (full.bytes_last_block, full.bytes_out_of_window) == (112 * TOKEN_BYTES, 0)
    # A window of 300 in a ring of two pages: 100 of the 400 tokens are out of the window.
    assert (windowed.layers, windowed.window, windowed.blocks_used) == (2, 300, 2)
    assert windowed.bytes_last_block == 112 * 2 * TOKEN_BYTES
    assert windowed.bytes_out_of_window == 100 * 2 * TOKEN_BYTES
    assert pool.stats().bytes_allocated == (400 + 2 * 300) * TOKEN_BYTES
    for _ in range(10):
        write(caches, 64)
    _, windowed = pool.stats().groups
    assert (windowed.bytes_last_block, windowed.bytes_out_of_window) == (0, 2 * 212 * TOKEN_BYTES)


def test_idle_slots_of_a_page_in_two_rings_are_those_that_neither_uses() -> None:
    pool = ring_pool()
    prefixes = PrefixCache(pool, has_states=False)
    write(caches_of(pool), 1)
    pool.clear()
    first = prefixes.fetch("", [7] * 700, pool.page_format).sequence
    caches = [PagedKVCache(pool, layer, [first]) for layer in range(LAYERS)]
    for count in [64] * 10 + [60]:
        write(caches, count)
    # The second page is the oldest in the ring, and the window sees its last 112 slots.
    kept = first.blocks(pool.groups[1])[1]
    prefixes.insert("", [7] * 700, first, None)
    found = prefixes.fetch("", [7] * 300 + [8], pool.page_format)
    assert found.num_tokens == 300
    # That page is the second sequence's latest, with 44 slots: 100 slots lie between those and the
    # 112.
    assert found.sequence.blocks(pool.groups[1])[1] == kept
    windowed = pool.stats().groups[1]
    assert (windowed.blocks_used, windowed.blocks_shared, windowed.blocks_cached) == (3, 1, 0)
    # The first sequence's latest page has 188 slots, and after them the tokens of the lap before.
    assert windowed.bytes_out_of_window == (100 + 256 - 188) * 2 * TOKEN_BYTES
    assert windowed.bytes_last_block == 0
    pool.check()
    assert_invariants(pool.stats(), pool.budget.mapped)


@pytest.mark.slow
def test_snapshots_from_another_thread_are_of_one_moment() -> None:
    pool = ring_pool(1 << 24)
    write(caches_of(pool), 1)
    seen: list[PoolStats] = []
    is_over = Event()

    def look() -> None:
        while not is_over.is_set():
            seen.append(pool.stats())

    looking = Thread(target=look)
    looking.start()
    rng = random.Random(0)
    held = []
    for _ in range(20):
        caches = caches_of(pool, rng.randrange(1, 4))
        write(caches, rng.randrange(1, 65))
        held.append(copy.deepcopy(caches))
        write(caches, 64)
        del held[: rng.randrange(3)]
    is_over.set()
    looking.join()
    for stats in seen:
        assert_invariants(stats, stats.bytes_mapped)
        for group in stats.groups:
            assert group.table_entries >= group.blocks_used - group.blocks_cached
            assert group.blocks_shared <= group.blocks_used


def test_looking_releases_nothing() -> None:
    pool = PagePool(1, max_bytes=1 << 22)
    caches = caches_of(pool)
    write(caches, 300)
    del caches
    gc.collect()
    seen = pool.snapshot()
    assert (seen.blocks_used, seen.tables, seen.tables_dropped) == (2, 1, 1)
    after = pool.stats()
    assert (after.blocks_used, after.tables, after.tables_dropped) == (0, 0, 0)


def test_states_of_blocks_that_the_prefix_index_holds_too() -> None:
    pool = PagePool(1, max_bytes=1 << 22)
    prefixes = PrefixCache(pool, has_states=False)
    first = caches_of(pool)
    write(first, 300)
    prefixes.insert("", list(range(300)), first[0].sequences[0], None)

    def states() -> tuple[int, int, int]:
        seen = pool.stats()
        pool.check()
        (slab,) = pool.groups[0].allocator.block_map()()
        assert Counter(slab.states) == {
            letter: count
            for letter, count in (
                ("u", seen.blocks_used - seen.blocks_shared),
                ("s", seen.blocks_shared),
                ("c", seen.blocks_cached),
                (".", seen.blocks_free),
            )
            if count
        }
        assert unpacked(packed(slab.states)) == slab.states
        view = view_pool(pool)
        assert view is not None
        assert all(each.shared == seen.blocks_shared for each in view.sequences)
        return seen.blocks_used, seen.blocks_shared, seen.blocks_cached

    assert states() == (2, 0, 0)
    found = prefixes.fetch("", list(range(290)), pool.page_format)
    assert found is not None
    assert states() == (2, 2, 0)
    assert (pool.stats().prefix_queries, pool.stats().prefix_hits) == (290, 289)
    del first
    gc.collect()
    assert states() == (2, 0, 0)
    assert used_rows(pool.stats()) == 289
    del found
    gc.collect()
    assert states() == (0, 0, 2)
    assert pool.stats().bytes_retained == pool.stats().bytes_mapped
    pool.clear()
    assert pool.stats().evictions == {"clear": 2}
