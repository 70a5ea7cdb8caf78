"""Block tables that reuse their entries, the arithmetic of windows, and the promises of rings."""

import gc
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv import PagePool
from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import PoolExhausted, RollbackError
from paged_kv.allocator.ring import Ring
from paged_kv.allocator.writes import Write, blocks_needed, reserve
from paged_kv.pool.window import DEFAULT_WRITE_CHUNK, Window
from tests.support.examples import examples
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
# The id of the first block of slab 1; slab 0 has four.
S1, S2 = 65536, 131072


def new_allocator(blocks: int = 100) -> BlockAllocator:
    allocator = BlockAllocator(ByteBudget(blocks), 1, PAGE)
    allocator.ensure_free({"fp16": 4})
    return allocator


def ring_table(allocator: BlockAllocator, ring: Ring, tokens: int) -> BlockTable:
    table = allocator.new_table(ring)
    assert reserve(table, 0, tokens) == {}
    return table


@pytest.mark.parametrize(
    ("ring", "entries"),
    [
        (Ring(1), [0, 0, 0, 0, 0, 0, 0]),
        (Ring(3), [0, 1, 2, 0, 1, 2, 0]),
        (Ring(2, head=1), [0, 1, 2, 1, 2, 1, 2]),
        (Ring(3, head=2), [0, 1, 2, 3, 4, 2, 3]),
    ],
)
def test_a_block_lives_where_an_earlier_one_did(ring: Ring, entries: list[int]) -> None:
    assert [ring.entry(block) for block in range(7)] == entries
    assert ring.size == len(set(entries))


@pytest.mark.parametrize(
    ("tokens", "entries"), [(0, 0), (1, 1), (4, 1), (5, 2), (12, 3), (13, 3), (1000, 3)]
)
def test_a_ring_has_entries_for_its_tokens_until_it_is_full(tokens: int, entries: int) -> None:
    allocator = new_allocator()
    assert ring_table(allocator, Ring(3), tokens).blocks == (0, 1, 2)[:entries]
    allocator.check()


def test_blocks_of_follows_the_tokens_around_the_ring() -> None:
    table = ring_table(new_allocator(), Ring(3, head=1), 4 * PAGE)
    assert table.blocks == (0, 1, 2, 3)
    assert table.blocks_of(0, 16) == (0, 1, 2, 3)
    assert table.blocks_of(15, 17) == (3, 1)
    assert table.blocks_of(20, 28) == (2, 3)
    assert table.blocks_of(28, 28) == ()


def test_the_last_block_may_be_the_first_again() -> None:
    table = ring_table(new_allocator(), Ring(3), 40)
    # Eleven tokens from the middle of a page touch four blocks of a ring of three.
    assert table.blocks_of(14, 25) == (0, 1, 2, 0)
    assert ring_table(new_allocator(), Ring(1), 40).blocks_of(3, 5) == (0, 0)


def test_a_full_ring_allocates_nothing_and_copies_nothing() -> None:
    allocator = new_allocator()
    table = ring_table(allocator, Ring(3), 12)
    before, blocks = allocator.stats(), table.blocks
    for position in range(12, 400):
        assert blocks_needed([Write(table, position, position + 1)]).total() == 0
        assert reserve(table, position, position + 1) == {}
        assert table.blocks is blocks
    assert allocator.stats() == before
    allocator.check()


def test_a_shared_block_of_a_full_ring_is_copied_when_its_turn_comes() -> None:
    allocator = new_allocator()
    table = ring_table(allocator, Ring(3), 22)
    fork = allocator.fork(table)
    # Token 22 continues in block 5, which is in entry 2, and token 24 goes to entry 0.
    assert reserve(fork, 22, 25) == {0: 3, 2: S1}
    assert (table.blocks, fork.blocks) == ((0, 1, 2), (3, 1, S1))
    assert reserve(fork, 25, 28) == {}
    # Both still hold only block 1; the original alone holds the others again.
    assert reserve(table, 22, 28) == {}
    assert reserve(table, 28, 29) == {1: S2}
    assert reserve(fork, 28, 29) == {}
    assert (table.blocks, fork.blocks, allocator.cow_copies) == ((0, S2, 2), (3, 1, S1), 3)
    allocator.check()


def test_a_write_around_the_whole_ring_copies_each_shared_block_once() -> None:
    allocator = new_allocator()
    table = ring_table(allocator, Ring(2), 100)
    fork = allocator.fork(table)
    assert blocks_needed([Write(fork, 101, 130)]).total() == 2
    assert reserve(fork, 101, 130) == {0: 2, 1: 3}
    assert blocks_needed([Write(fork, 130, 140), Write(table, 100, 140)]).total() == 0


def test_a_fork_of_a_ring_that_is_not_full_copies_its_tail_and_appends() -> None:
    allocator = new_allocator()
    table = ring_table(allocator, Ring(3), 6)
    fork = allocator.fork(table)
    assert reserve(fork, 6, 14) == {0: 2, 1: 3}
    assert (table.blocks, fork.blocks) == ((0, 1), (2, 3, S1))
    assert fork.ring == table.ring
    allocator.drop(fork)
    assert allocator.stats().blocks_used == 2
    allocator.check()


def test_truncating_before_the_ring_is_used_again_frees_the_tail() -> None:
    allocator = new_allocator()
    table = ring_table(allocator, Ring(3, head=1), 15)
    fork = allocator.fork(table)
    for tokens, blocks in ((12, (0, 1, 2)), (5, (0, 1)), (1, (0,)), (0, ())):
        table.truncate(tokens)
        assert table.blocks == blocks
        assert not table.is_reserved(tokens + 1)
    assert fork.blocks == (0, 1, 2, 3)
    allocator.drop(fork)
    assert allocator.stats().blocks_used == 0
    allocator.check()


def test_exhaustion_in_a_full_ring_changes_nothing() -> None:
    allocator = new_allocator(blocks=4)
    table = ring_table(allocator, Ring(3), 30)
    fork, blocks = allocator.fork(table), table.blocks
    with pytest.raises(PoolExhausted) as error:
        reserve(fork, 30, 33)
    assert (error.value.needed, error.value.free) == (2, 1)
    assert (table.blocks, fork.blocks, allocator.cow_copies) == (blocks, blocks, 0)
    assert list(reserve(fork, 30, 32)) == [blocks[1]]
    allocator.check()


@examples(100)
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


@pytest.mark.parametrize(
    ("size", "write_chunk", "entries"),
    [
        (1, 1, 1),
        (20, 20, 1),
        (128, 128, 1),
        (200, 57, 1),
        (200, 58, 2),
        (256, 1, 1),
        (256, 2, 2),
        (256, 256, 2),
        (257, 256, 2),
        (258, 256, 3),
        (300, 100, 2),
        (1024, 256, 5),
        (1024, 1024, 8),
        (4096, 256, 17),
    ],
)
def test_a_ring_holds_a_window_and_a_write(size: int, write_chunk: int, entries: int) -> None:
    window = Window(size, write_chunk)
    assert window.ring == Ring(entries, window=size)
    assert (window.capacity, window.head_end) == (256 * entries, 0)
    assert 256 * (entries - 1) < size + write_chunk - 1 <= 256 * entries


@pytest.mark.parametrize("write_chunk", [0, -1, 301, 2048])
def test_a_write_chunk_that_is_no_use_is_refused_with_the_reason(write_chunk: int) -> None:
    with pytest.raises(ValueError, match=r"must lie in \[1, 300\].*before it is written") as error:
        Window(300, write_chunk)
    assert f"got {write_chunk}:" in str(error.value)
    assert Window(300, 1).write_chunk == 1
    assert Window(300, 300).write_chunk == 300


@pytest.mark.parametrize(("size", "keep"), [(0, 0), (-3, 0), (8, -1)])
def test_a_window_without_tokens_is_refused(size: int, keep: int) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        Window(size, 1, keep)


def test_the_default_write_chunk_is_a_page() -> None:
    assert DEFAULT_WRITE_CHUNK == 256


@pytest.mark.parametrize(
    ("written", "first_held", "shortest"),
    # Two pages hold 512 tokens; a sequence of 300 + n tokens must hold those from n + 1 on.
    [(0, 0, 0), (511, 0, 0), (512, 0, 0), (513, 1, 300), (600, 88, 387), (5000, 4488, 4787)],
)
def test_what_is_held_says_how_far_back_is_possible(
    written: int, first_held: int, shortest: int
) -> None:
    window = Window(300, 100)
    assert window.first_held(written) == first_held
    assert window.shortest_rollback(written) == shortest
    assert not shortest or written - shortest >= window.write_chunk


def test_a_window_that_fills_its_pages_can_roll_back_by_its_write_chunk() -> None:
    window = Window(257, 256)
    assert window.capacity == 512
    assert [n - window.shortest_rollback(n) for n in (512, 513, 777, 4096)] == [512, 256, 256, 256]


@pytest.mark.parametrize(
    ("start", "end", "parts"),
    [
        (0, 512, [(0, 512)]),
        (0, 513, [(1, 513)]),
        (100, 700, [(188, 700)]),
        (600, 700, [(600, 700)]),
        (700, 700, []),
        (0, 2048, [(1536, 2048)]),
    ],
)
def test_of_a_long_step_the_last_ringful_is_kept(
    start: int, end: int, parts: list[tuple[int, int]]
) -> None:
    assert Window(300, 100).kept_parts(start, end) == parts


@pytest.mark.parametrize(
    ("start", "end", "parts"),
    [
        (0, 200, [(0, 200)]),
        (0, 300, [(0, 256), (256, 300)]),
        (0, 2000, [(0, 256), (1488, 2000)]),
        (100, 2000, [(100, 256), (1488, 2000)]),
        (900, 1000, [(900, 1000)]),
    ],
)
def test_of_a_long_step_the_head_is_kept_too(
    start: int, end: int, parts: list[tuple[int, int]]
) -> None:
    window = Window(300, 100, sink_tokens=4)
    assert (window.ring, window.head_end) == (Ring(2, 1, window.size, window.sink_tokens), 256)
    assert window.kept_parts(start, end) == parts


def ring_pool(*windows: Window) -> PagePool:
    """Layer 0 sees everything, and each of the others through a window."""
    both = dict(enumerate(windows, start=1))
    return PagePool(1 + len(windows), windows=both, max_bytes=64 << 20)


@pytest.mark.parametrize("write_chunk", [1, 2, 100, 213, 214, 300])
def test_every_write_chunk_rolls_back_exactly_after_several_wraps(write_chunk: int) -> None:
    window = Window(300, write_chunk)
    batch = new_batch(ring_pool(window))
    for count in (1, 700, 299, 1, 1, write_chunk, min(write_chunk + 1, 300), 900):
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


def test_a_sequence_that_never_wrapped_can_be_trimmed_to_nothing() -> None:
    batch = new_batch(ring_pool(Window(300, 100)))
    append(batch, 512)
    assert batch.layers[1].can_trim(512)
    assert [cache.trim(1000) for cache in batch.layers] == [512, 512]
    assert batch.layers[0].pool.stats().blocks_used == 0
    batch.rows[0].trim(1000)
    assert append(batch, 700)


def test_a_ring_pays_for_its_pages_only_and_never_for_more() -> None:
    pool = ring_pool(Window(300, 100))
    batch = new_batch(pool)
    page_bytes = 2 * 256 * KV_HEADS * DIM * 4
    for count, pages in ((1, 1), (255, 1), (1, 2), (255, 2), (1, 2), (5000, 2)):
        append(batch, count)
        assert batch.layers[1].nbytes == pages * page_bytes
    assert batch.layers[0].nbytes == -(-5513 // 256) * page_bytes


def test_a_thousand_tokens_in_full_rings_allocate_nothing() -> None:
    pool = PagePool(2, windows={0: Window(300, 100), 1: Window(20, 20)}, max_bytes=64 << 20)
    batch = new_batch(pool, rows=2)
    append(batch, 600)
    before = pool.stats()
    keys = mx.ones((2, KV_HEADS, 1, DIM))
    for _ in range(1000):
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


@pytest.mark.parametrize("count", [1, 3, 100, 101, 2048])
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


def test_a_loaded_cache_takes_no_more_pages_than_the_one_that_was_saved() -> None:
    batch = new_batch(ring_pool(Window(300, 100)))
    append(batch, 500)
    for cache in batch.layers:
        cache.trim(400)
    batch.rows[0].trim(400)
    loaded = saved_and_loaded(batch)
    held = [cache.nbytes for cache in batch.layers]
    assert [cache.nbytes for cache in loaded.layers] == held
    assert append(loaded, 2)
