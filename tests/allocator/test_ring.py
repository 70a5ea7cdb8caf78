"""Block tables that reuse their entries, the arithmetic of windows, and the promises of rings."""

import gc
from dataclasses import replace
from itertools import product

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv import PagePool
from paged_kv.allocator.block_allocator import BlockAllocator, BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import RollbackError
from paged_kv.allocator.ring import Ring
from paged_kv.allocator.writes import Write, blocks_needed
from paged_kv.pool.layer_kinds import DEFAULT_WRITE_CHUNK, Window
from tests.support.examples import examples
from tests.support.reserving import reserve
from tests.support.ring_batches import (
    DIM,
    KV_HEADS,
    append,
    assert_holds,
    fork,
    new_batch,
    saved_and_loaded,
)

PAGE = 4


def new_allocator(blocks: int = 100) -> BlockAllocator:
    allocator = BlockAllocator(ByteBudget(blocks), 1, PAGE)
    allocator.ensure_free({"fp16": 4})
    return allocator


def ring_table(allocator: BlockAllocator, ring: Ring, tokens: int) -> BlockTable:
    table = allocator.new_table(ring)
    assert reserve(table, 0, tokens) == {}
    return table


def test_slots_are_those_that_hold_tokens_and_those_that_the_next_token_sees() -> None:
    for ring in (Ring(3), Ring(3, window=7), Ring(2, head=1, window=5, sink_tokens=2)):
        for tokens, entry in product(range(40), range(ring.size)):
            own = [each for each in range(tokens) if ring.entry(each // PAGE) == entry]
            latest = {position % PAGE: position for position in own}
            window = ring.window if ring.window is not None else tokens
            seen = {*range(tokens - window, tokens), *range(ring.sink_tokens)}
            bits = sum(1 << slot for slot in latest)
            seen_bits = sum(1 << slot for slot, position in latest.items() if position in seen)
            assert ring.slots(entry, tokens, PAGE) == (bits, seen_bits)


@pytest.mark.parametrize("ring", [Ring(1), Ring(3), Ring(2, head=1), Ring(3, head=2)])
def test_the_held_pages_are_the_latest_of_each_entry(ring: Ring) -> None:
    for last in range(10):
        latest = {ring.entry(page): page for page in range(last + 1)}
        assert ring.held(last) == [latest[entry] for entry in sorted(latest)]


def test_blocks_of_follows_the_tokens_around_the_ring() -> None:
    table = ring_table(new_allocator(), Ring(3, head=1), 4 * PAGE)
    assert table.blocks == table.blocks_of(0, 16) == (0, 1, 2, 3)
    assert table.blocks_of(15, 17) == (3, 1)
    assert table.blocks_of(28, 28) == ()
    # Eleven tokens from the middle of a page touch four blocks of a ring of three.
    assert ring_table(new_allocator(), Ring(3), 40).blocks_of(14, 25) == (0, 1, 2, 0)


@examples(60)
@given(
    entries=st.integers(1, 4),
    head=st.integers(0, 2),
    grown=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=8),
)
def test_blocks_needed_is_exact_for_forks_at_different_phases(
    entries: int, head: int, grown: list[tuple[int, int]]
) -> None:
    allocator = new_allocator(1000)
    tables, lengths = [allocator.new_table(Ring(entries, head=head))], [0]
    for index, count in grown:
        index %= len(tables)
        tables.append(allocator.fork(tables[index]))
        lengths.append(lengths[index])
        writes = [Write(tables[at], lengths[at], lengths[at] + count) for at in (index, -1)]
        needed, before = blocks_needed(writes).total(), allocator.stats().blocks_used
        for at, write in zip((index, -1), writes, strict=True):
            reserve(write.table, write.start, write.end)
            lengths[at] = write.end
        assert allocator.stats().blocks_used == before + needed
        written = set(writes[0].table.blocks_of(writes[0].start, writes[0].end))
        assert all(allocator.ref_count(block) == 1 for block in written)
        allocator.check()


def test_a_ring_holds_a_window_and_a_write() -> None:
    for size, write_chunk, entries in (
        *((1, 1, 1), (128, 128, 1), (200, 57, 1), (200, 58, 2), (256, 1, 1), (256, 2, 2)),
        *((257, 256, 2), (258, 256, 3), (1024, 1024, 8), (4096, DEFAULT_WRITE_CHUNK, 17)),
    ):
        window = Window(size, write_chunk)
        assert window.ring == Ring(entries, window=size)
        assert (window.capacity, window.head_end) == (256 * entries, 0)
        assert 256 * (entries - 1) < size + write_chunk - 1 <= 256 * entries


@pytest.mark.parametrize(
    ("size", "write_chunk", "keep"), [(300, 0, 0), (300, 301, 0), (0, 1, 0), (-3, 1, 0), (8, 1, -1)]
)
def test_a_window_that_is_no_use_is_refused(size: int, write_chunk: int, keep: int) -> None:
    with pytest.raises(ValueError, match=r"at least 1 token|must lie in"):
        Window(size, write_chunk, keep)
    assert Window(300, 1).write_chunk == 1
    assert Window(300, 300).write_chunk == 300


def test_what_is_held_says_how_far_back_is_possible() -> None:
    """Two pages hold 512 tokens; a sequence of 300 + n tokens must hold those from n + 1 on."""
    window = Window(300, 100)
    for written, first_held, shortest in (
        *((0, 0, 0), (512, 0, 0), (513, 1, 300)),
        *((600, 88, 387), (5000, 4488, 4787)),
    ):
        assert window.first_held(written) == first_held
        assert window.shortest_rollback(written) == shortest
        assert not shortest or written - shortest >= window.write_chunk
    full = Window(257, 256)
    assert [n - full.shortest_rollback(n) for n in (512, 513, 777, 4096)] == [512, 256, 256, 256]


def test_of_a_long_step_the_last_ringful_and_the_head_are_kept() -> None:
    window, with_head = Window(300, 100), Window(300, 100, sink_tokens=4)
    assert (with_head.ring, with_head.head_end) == (Ring(2, 1, 300, 4), 256)
    for each, start, end, parts in (
        (window, 0, 512, [(0, 512)]),
        (window, 0, 513, [(1, 513)]),
        (window, 100, 700, [(188, 700)]),
        (window, 600, 700, [(600, 700)]),
        (window, 700, 700, []),
        (with_head, 0, 200, [(0, 200)]),
        (with_head, 0, 300, [(0, 256), (256, 300)]),
        (with_head, 100, 2000, [(100, 256), (1488, 2000)]),
        (with_head, 900, 1000, [(900, 1000)]),
    ):
        assert each.kept_parts(start, end) == parts


def ring_pool(*windows: Window) -> PagePool:
    """Layer 0 sees everything, and each of the others through a window."""
    both = dict(enumerate(windows, start=1))
    return PagePool(1 + len(windows), windows=both, max_bytes=64 << 20)


@pytest.mark.parametrize("write_chunk", [1, 100, 214, 300])
def test_every_write_chunk_rolls_back_exactly_after_several_wraps(write_chunk: int) -> None:
    window = Window(300, write_chunk)
    batch = new_batch(ring_pool(window))
    for count in (1, 700, 299, 1, write_chunk, min(write_chunk + 1, 300), 900):
        assert append(batch, count)
        possible = batch.rows[0].rollback([window])
        assert possible >= min(write_chunk - 1, len(batch.rows[0].tokens))
    assert [cache.can_trim(possible) for cache in batch.layers] == [True, True]
    assert [cache.can_trim(possible + 1) for cache in batch.layers] == [False, False]
    assert [cache.trim(possible) for cache in batch.layers] == [possible, possible]
    batch.rows[0].trim(possible)
    assert not any(cache.is_trimmable() for cache in batch.layers)
    for count in (1, 3, 350):
        assert append(batch, count)


def test_too_much_rollback_says_how_much_is_possible_and_changes_nothing() -> None:
    batch = new_batch(ring_pool(Window(256, 256), Window(20, 20)), rows=2)
    append(batch, 536)
    # The second ring holds 256 tokens, and the next token must see 19 of them.
    for counts in ([0, 238], [7, 238], [600, 0]):
        for cache in batch.layers:
            with pytest.raises(RollbackError, match=f"tokens asked: {max(counts)}, possible: 237"):
                cache.trim_per_sequence(counts)
            assert_holds(cache, batch.rows)
    assert [cache.trim_per_sequence([7, 237]) for cache in batch.layers] == [[7, 237]] * 3
    for row, count in zip(batch.rows, (7, 237), strict=True):
        row.trim(count)
    assert append(batch, 5)


def test_tokens_in_full_rings_allocate_nothing() -> None:
    pool = PagePool(2, windows={0: Window(300, 100), 1: Window(20, 20)}, max_bytes=64 << 20)
    batch = new_batch(pool, rows=2)
    append(batch, 600)
    before = pool.stats()
    keys = mx.ones((2, KV_HEADS, 1, DIM))
    for _ in range(100):
        for cache in batch.layers:
            cache.make_mask(1)
            found, _ = cache.batch.append(cache.layer, keys, keys)
            found.read.attend(keys, None, scale=1.0)
    # What the latest step holds beside slabs is not of pages.
    now = pool.stats()
    assert replace(now, bytes_steps=0, bytes_scratch=0) == replace(
        before, bytes_steps=0, bytes_scratch=0
    )
    for row in batch.rows:
        assert row.rollback([Window(20, 20)]) == 600 - (600 - 256 + 19)


@pytest.mark.parametrize("count", [1, 101, 2048])
def test_what_a_page_held_before_is_never_seen(count: int) -> None:
    """Pages that other sequences freed are full of NaN, which a weight of zero would not hide."""
    pool = ring_pool(Window(300, 100), Window(20, 20))
    nothing = mx.full((3, KV_HEADS, 3000, DIM), mx.nan)
    for cache in new_batch(pool, rows=3).layers:
        cache.update_and_fetch(nothing, nothing)
        cache.update_and_fetch(nothing[:, :, :1], nothing[:, :, :1])
    del cache
    gc.collect()
    assert pool.stats().blocks_used == 0
    batch = new_batch(pool, rows=2)
    append(batch, 40, [40, 7])
    for _ in range(3):
        append(batch, count)
    other = saved_and_loaded(batch)
    assert append(other, count, [count, count // 2])
    assert append(fork(batch), 3)
