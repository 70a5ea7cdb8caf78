"""The allocator: block states, order, slabs, and refused calls without side effects."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import BlockStateError, PoolExhausted
from paged_kv.allocator.rewriting import Rewrite
from paged_kv.allocator.slabs import slab_of
from paged_kv.allocator.writes import reserve

# Ids of the first blocks of slabs 1 and 2; those of slab 0 begin at 0.
S1, S2 = 65536, 131072
BLOCK_BYTES = 10


def new_allocator(blocks: int = 1000, **callbacks: Any) -> BlockAllocator:
    return BlockAllocator(ByteBudget(blocks * BLOCK_BYTES), BLOCK_BYTES, 256, **callbacks)


def state(allocator: BlockAllocator) -> Any:
    """The state that a refused call must not change."""
    tables = {id(table): list(table.blocks) for table in allocator.tables}
    mapped, slabs = allocator.budget.mapped, dict(allocator.slabs)
    formats = [(list(each.free), dict(each.used), each.block_bytes) for each in allocator.formats]
    return formats, dict(allocator.refs.counts), slabs, mapped, tables


def free_blocks(allocator: BlockAllocator) -> list[int]:
    return [block for each in allocator.formats for block in each.free]


class SlabLog:
    """The callbacks of an allocator: notes each call, and can fail at the n-th slab."""

    def __init__(self, fail_at: int = -1) -> None:
        self.sizes: list[int] = []
        self.mapped: list[int] = []
        self.unmapped: list[int] = []
        self.fail_at = fail_at

    def map_slab(self, slab: int, pages: int, page_format: str) -> None:
        if len(self.mapped) == self.fail_at:
            raise MemoryError("planted")
        self.mapped.append(slab)
        self.sizes.append(pages)

    def rewrite(self, rewrite: Rewrite, slab: int, moves: Mapping[int, int]) -> bool:
        if rewrite.new_pages:
            self.map_slab(slab, rewrite.new_pages, rewrite.slabs.name)
        self.unmapped += rewrite.emptied
        return True

    def new_allocator(self, blocks: int = 1000, **callbacks: Any) -> BlockAllocator:
        callbacks = {"map_slab": self.map_slab, "unmap_slab": self.unmapped.append, **callbacks}
        return new_allocator(blocks, **callbacks)


def test_a_block_is_free_until_allocated_and_again_after_its_last_release() -> None:
    allocator = new_allocator()
    allocator.ensure_free({"fp16": 2})
    reserve(allocator.new_table(), 0, 1)
    (block,) = allocator.allocate(1)
    counts = [allocator.ref_count(block)]
    for step in (allocator.retain, allocator.release, allocator.release):
        step([block])
        counts.append(allocator.ref_count(block))
    assert counts == [1, 2, 1, 0]
    assert (allocator.capacity, free_blocks(allocator)) == (2, [block])
    allocator.check()


def test_the_lowest_free_ids_are_handed_out_first() -> None:
    allocator = new_allocator()
    assert allocator.allocate(4) + allocator.allocate(2) == [0, 1, 2, 3, S1, S1 + 1]
    allocator.ensure_free({"fp16": 2})
    allocator.release([S1, 1])
    assert allocator.allocate(1) == [1]
    assert allocator.allocate(2) == [S1, S2]
    allocator.release([3, 0, 2])
    assert allocator.allocate(4) == [0, 2, 3, S2 + 1]


def test_allocation_is_all_or_nothing() -> None:
    log = SlabLog()
    allocator = log.new_allocator(blocks=10)
    allocator.allocate(3)
    before = state(allocator)
    with pytest.raises(PoolExhausted) as error:
        allocator.allocate(8)
    found = error.value
    assert (found.needed, found.free, found.evictable, found.budget) == (8, 7, 0, 100)
    assert str(found).startswith(
        "blocks needed: 8 (80 bytes), free: 7 (70 bytes), evictable: 0, within a budget of 100 "
        "bytes: raise max_bytes, drop caches"
    )
    assert state(allocator) == before
    assert log.mapped == [0, 1, 2]
    assert allocator.stats().allocation_failures == 1
    assert len(allocator.allocate(7)) == 7


@pytest.mark.parametrize(
    ("call", "blocks", "block", "found"),
    [
        ("retain", [0, 2], 2, "free"),
        ("retain", [0, 77], 77, "unknown to this pool"),
        ("retain", [0, -1], -1, "unknown to this pool"),
        ("release", [0, 2], 2, "free"),
        ("release", [1, 0, S1], S1, "unknown to this pool"),
        ("release", [0, 1, 0], 0, "free"),
        ("release", [1, 1, 0, 1], 1, "free"),
    ],
)
def test_a_block_that_is_not_used_is_refused_and_nothing_changes(
    call: str, blocks: list[int], block: int, found: str
) -> None:
    allocator = new_allocator()
    allocator.release(allocator.allocate(4)[2:])
    allocator.retain([1])
    before = state(allocator)
    with pytest.raises(BlockStateError) as error:
        getattr(allocator, call)(blocks)
    assert (error.value.block, error.value.state) == (block, found)
    assert str(error.value).startswith(f"block {block} is {found}: it was released before")
    assert state(allocator) == before


def test_a_block_may_be_named_as_often_as_it_has_references() -> None:
    allocator = new_allocator()
    allocator.allocate(1)
    allocator.retain([0, 0])
    allocator.release([0, 0, 0])
    assert allocator.ref_count(0) == 0
    allocator.check()


def test_references_are_counted_by_every_call_that_adds_or_removes_one() -> None:
    """Against a list of those who hold a block."""
    allocator = new_allocator()
    held = allocator.allocate(4)
    kept: list[int] = []

    def check() -> None:
        holders = Counter(held)
        allocator.refs.check(held)
        for block in range(4):
            assert allocator.ref_count(block) == holders[block] + kept.count(block)
        stats = allocator.stats()
        assert stats.table_entries == len(held)
        assert stats.blocks_shared == sum(count > 1 for count in holders.values())
        (fp16,) = stats.formats
        assert fp16.cached == sum(not holders[block] for block in kept)
        assert fp16.used == len(holders)

    def retain(blocks: list[int]) -> None:
        allocator.retain(blocks)
        held.extend(blocks)
        check()

    def release(blocks: list[int]) -> None:
        allocator.release(blocks)
        for block in blocks:
            held.remove(block)
        check()

    check()
    retain([0, 1])
    retain([0, 2, 2])
    release([2])
    for block in (1, 3):
        allocator.keep(block, lambda source, target: None)
        kept.append(block)
        check()
    release([1, 1, 3])
    retain([3])
    retain([3, 3, 1])
    allocator.evict(1)
    kept.remove(1)
    check()
    allocator.keep(1, lambda source, target: None)
    kept.append(1)
    check()
    release([3, 0, 3])
    release([0, 3, 1])
    for block in (3, 1):
        allocator.evict(block)
        kept.remove(block)
        check()
    release([2])
    release([0, 2])
    assert (held, allocator.capacity) == ([], 0)


def test_a_block_that_moves_takes_its_references_along() -> None:
    """One that a table holds and the prefix index keeps, one that is cached, and one of a table."""
    allocator = new_allocator()
    allocator.add_format("q8", BLOCK_BYTES // 2)
    table, other = allocator.new_table(), allocator.new_table()
    reserve(other, 0, 1)
    reserve(table, 0, 2 * 256)
    found: list[tuple[int, int]] = []
    for block in table.blocks:
        allocator.keep(block, lambda *move: found.append(move))
    moved = [*table.blocks, *other.blocks]
    table.truncate(256)
    allocator.ensure_free({"q8": 3})
    moves = dict(zip(moved, list(allocator.format_named("q8").free), strict=False))
    allocator.apply_moves(moves)
    held, cached, alone = moves.values()
    assert found == list(moves.items())[:2]
    assert (table.blocks, other.blocks) == ((held,), (alone,))
    assert allocator.refs.counts == {held: 2, cached: 1, alone: 1}
    assert [each.cached for each in allocator.stats().formats] == [0, 1]
    assert allocator.slabs == {slab_of(held): 3}
    allocator.check()


@pytest.mark.parametrize("way", ["drop", "drop_later"])
def test_a_dropped_table_frees_the_blocks_that_no_other_holds(way: str) -> None:
    allocator = new_allocator()
    table = allocator.new_table()
    reserve(table, 0, 3 * 256)
    fork = allocator.fork(table)
    reserve(fork, 0, 1)
    reserve(allocator.new_table(), 0, 1)
    getattr(allocator, way)(table)
    assert (allocator.available(), allocator.stats().blocks_used) == (1000 - 4, 4)
    assert table not in allocator.tables
    assert sorted(allocator.refs.counts.values()) == [1] * 4
    allocator.check()
    getattr(allocator, way)(fork)
    assert (allocator.available(), allocator.stats().blocks_used) == (1000 - 1, 1)
    assert (fork.blocks, fork.tokens, len(allocator.tables)) == ((), 0, 1)
    allocator.check()


def test_a_second_release_is_refused_also_after_the_slab_was_given_back() -> None:
    allocator = new_allocator()
    blocks = allocator.allocate(12)
    allocator.release(blocks)
    assert 0 not in allocator.slabs
    with pytest.raises(BlockStateError, match="block 0 is unknown to this pool"):
        allocator.release(blocks)


def test_the_first_slabs_are_as_large_as_the_step_that_needs_them() -> None:
    log = SlabLog()
    assert len(log.new_allocator().allocate(5)) == 5
    assert log.sizes == [5]


@pytest.mark.parametrize(
    ("needed", "sizes"), [(8, [8]), (9, [4, 5]), (32, [8] * 4), (100, [12] * 4 + [13] * 4)]
)
def test_a_long_step_maps_slabs_of_an_eighth_each(needed: int, sizes: list[int]) -> None:
    log = SlabLog()
    log.new_allocator().allocate(needed)
    assert log.sizes == sizes


def test_no_slab_is_larger_than_an_eighth_of_the_budget() -> None:
    log = SlabLog()
    allocator = log.new_allocator(blocks=30)
    allocator.allocate(30)
    assert (log.sizes, allocator.budget.left) == ([3] * 10, 0)


def test_slabs_grow_by_a_64th_of_what_is_held() -> None:
    log = SlabLog()
    allocator = log.new_allocator()
    allocator.allocate(63)
    held = [(allocator.allocate(1), allocator.capacity)[1] for _ in range(240)]
    idle = [capacity - used for used, capacity in enumerate(held, 64)]
    assert all(each < used / 64 for used, each in enumerate(idle, 64))
    # Page by page up to 128, by two up to 192, and by three.
    assert len(log.sizes) == 8 + 65 + 32 + 34


def test_growth_ahead_ends_where_the_caller_says() -> None:
    allocator = new_allocator()
    allocator.allocate(640)
    allocator.ensure_free({"fp16": 1}, 2 * BLOCK_BYTES)
    assert len(free_blocks(allocator)) == 3
    allocator.ensure_free({"fp16": 5}, 0)
    assert len(free_blocks(allocator)) == 5


def test_growth_ahead_leaves_the_budget_to_other_needs() -> None:
    allocator = new_allocator(blocks=390)
    allocator.add_format("q8", BLOCK_BYTES // 2)
    allocator.allocate(384)
    allocator.ensure_free({"fp16": 1, "q8": 6})
    assert [len(each.free) for each in allocator.formats] == [3, 6]
    assert allocator.budget.left == 0


def test_a_budget_below_eight_blocks_is_mapped_block_by_block() -> None:
    log = SlabLog()
    allocator = log.new_allocator(blocks=3)
    assert allocator.allocate(3) == [0, S1, S2]
    assert log.sizes == [1, 1, 1]


def test_ensure_free_counts_what_is_free_already() -> None:
    log = SlabLog()
    allocator = log.new_allocator()
    assert (allocator.allocate(0), log.sizes) == ([], [])
    for count in (3, 4, 1, 0):
        allocator.ensure_free({"fp16": count})
    assert log.sizes == [3, 1]
    allocator.ensure_free({"fp16": 5})
    assert log.sizes == [3, 1, 1]
    allocator.check()


@pytest.mark.parametrize(("released", "left"), [(1, 20), (2, 20), (3, 19), (7, 14), (20, 0)])
def test_blocks_beyond_an_eighth_of_the_used_ones_are_given_back(released: int, left: int) -> None:
    log = SlabLog()
    allocator = log.new_allocator()
    blocks = [allocator.allocate(1)[0] for _ in range(20)]
    allocator.release(blocks[-released:])
    assert (allocator.capacity, allocator.budget.mapped) == (left, left * BLOCK_BYTES)
    assert len(log.unmapped) == len(log.mapped) - len(allocator.slabs)


def test_a_format_of_which_no_block_is_used_maps_nothing() -> None:
    log = SlabLog()
    allocator = log.new_allocator()
    allocator.add_format("q4", BLOCK_BYTES // 2)
    allocator.allocate(1)
    allocator.release(allocator.allocate(1, "q4"))
    assert (allocator.slabs, log.unmapped) == ({0: 1}, [1])


def test_coming_and_going_at_the_edge_of_a_slab_maps_it_once() -> None:
    log = SlabLog()
    allocator = log.new_allocator()
    allocator.allocate(4)
    for _ in range(5):
        allocator.release(allocator.allocate(1))
    assert (log.mapped, log.unmapped) == ([0, 1], [])


def test_the_slot_of_a_slab_that_was_given_back_is_used_again() -> None:
    log = SlabLog()
    allocator = log.new_allocator()
    blocks = allocator.allocate(4) + allocator.allocate(8)
    allocator.release(blocks[:4])
    assert log.unmapped == [0]
    assert allocator.allocate(5) == [0, 1, 2, 3, 4]
    assert log.mapped == [0, 1, 0]


def test_a_step_of_several_slabs_joins_those_of_its_own_format() -> None:
    """No slab can grow by four pages where none may have more than four."""
    log = SlabLog()
    allocator = log.new_allocator(32, max_slabs=5, rewrite_slabs=log.rewrite)
    for _ in range(4):
        allocator.allocate(1)
    allocator.ensure_free({"fp16": 12})
    assert log.sizes == [1, 1, 1, 1, 4, 4, 4, 4]
    assert sorted(allocator.slabs.values()) == [4, 4, 4, 4]


@pytest.mark.parametrize("fail_at", range(1, 6))
def test_a_slab_that_cannot_be_mapped_leaves_all_as_it_was(fail_at: int) -> None:
    log = SlabLog(fail_at)
    allocator = log.new_allocator()
    allocator.release(allocator.allocate(3)[2:])
    before = state(allocator)
    with pytest.raises(MemoryError, match="planted"):
        allocator.allocate(200)
    assert state(allocator) == before
    assert log.unmapped == log.mapped[1:]
    assert len(log.unmapped) == fail_at - 1
    log.fail_at = -1
    assert allocator.allocate(2) == [2, S1]
    assert len(allocator.allocate(200)) == 200


def test_the_first_slab_may_fail_too() -> None:
    allocator = SlabLog(fail_at=0).new_allocator()
    with pytest.raises(MemoryError):
        allocator.allocate(1)
    assert (allocator.slabs, allocator.budget.mapped, allocator.capacity) == ({}, 0, 0)


def test_only_empty_slabs_are_given_back_on_request() -> None:
    log = SlabLog()
    allocator = log.new_allocator()
    allocator.allocate(5)
    allocator.ensure_free({"fp16": 1})
    allocator.ensure_free({"fp16": 2})
    assert log.sizes == [5, 1, 1]
    allocator.allocate(1)
    assert (allocator.unmap_empty_slabs(), log.unmapped) == (1, [2])
    assert allocator.unmap_empty_slabs() == 0
    assert allocator.allocate(1) == [S2]


def test_the_size_of_a_block_can_grow_and_shrink_within_the_budget() -> None:
    allocator = new_allocator(blocks=32)
    allocator.release(allocator.allocate(4)[2:3])
    for block_bytes, mapped in ((80, 320), (10, 40), (15, 60)):
        allocator.set_block_bytes({"fp16": block_bytes})
        assert (allocator.formats[0].block_bytes, allocator.budget.mapped) == (block_bytes, mapped)
        assert allocator.stats().bytes_active == 3 * block_bytes
    assert allocator.available() == 1 + 260 // 15


def test_a_size_that_no_longer_fits_is_refused() -> None:
    allocator = new_allocator(blocks=32)
    allocator.allocate(4)
    before = state(allocator)
    with pytest.raises(PoolExhausted) as error:
        allocator.set_block_bytes({"fp16": 81})
    assert error.value.needed > error.value.free
    assert (error.value.evictable, error.value.budget) == (0, 320)
    assert state(allocator) == before
    assert allocator.stats().allocation_failures == 1


@pytest.mark.parametrize("blocks", [1, 3, 7, 8, 9, 31, 100, 1000])
@pytest.mark.parametrize("used", [0, 1, 5, 13])
def test_available_is_what_can_be_had_and_not_one_more(blocks: int, used: int) -> None:
    allocator = new_allocator(blocks)
    allocator.allocate(min(used, blocks))
    before = state(allocator)
    available = allocator.available()
    assert available == blocks - min(used, blocks)
    with pytest.raises(PoolExhausted):
        allocator.allocate(available + 1)
    assert state(allocator) == before
    assert len(allocator.allocate(available)) == available


def test_what_another_allocator_mapped_is_not_available() -> None:
    budget = ByteBudget(100 * BLOCK_BYTES)
    first, second = BlockAllocator(budget, BLOCK_BYTES), BlockAllocator(budget, 2 * BLOCK_BYTES)
    first.allocate(24)
    assert first.available() == 76
    assert second.available() == 38
    second.check()


def test_stats_add_up() -> None:
    allocator = new_allocator()
    table = allocator.new_table()
    reserve(table, 0, 5 * 256)
    allocator.ensure_free({"fp16": 7})
    fork = allocator.fork(table)
    reserve(fork, 0, 1)
    stats = allocator.stats()
    assert (stats.blocks_used, stats.blocks_free, stats.blocks_shared) == (6, 6, 4)
    assert (stats.table_entries, stats.slabs, stats.cow_copies) == (10, 2, 1)
    assert stats.table_entries == sum(map(allocator.ref_count, {*table.blocks, *fork.blocks}))
    assert stats.blocks_used + stats.blocks_free == allocator.capacity
    assert stats.bytes_mapped == allocator.budget.mapped == 12 * BLOCK_BYTES
    assert stats.bytes_active == 6 * BLOCK_BYTES
    assert stats.allocation_failures == 0


def add_reference(allocator: BlockAllocator) -> None:
    allocator.refs.counts[1] += 1


def lose_an_entry(allocator: BlockAllocator) -> None:
    table = next(iter(allocator.tables))
    table.blocks = table.blocks[:-1]


def miscount_slab(allocator: BlockAllocator) -> None:
    allocator.formats[0].used[0] += 1


def miscount_bytes(allocator: BlockAllocator) -> None:
    allocator.budget.mapped -= 1


def overspend(allocator: BlockAllocator) -> None:
    allocator.budget.max_bytes = allocator.budget.mapped - 1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda allocator: allocator.formats[0].free.add(S1), "a block is free twice"),
        (lambda allocator: allocator.formats[0].free.add(0), "a block is free and used"),
        (lambda allocator: allocator.formats[0].free.remove(S1), "a block is lost"),
        (lambda allocator: allocator.formats[0].free.add(99), "lies outside every slab"),
        (lambda allocator: allocator.formats[0].slabs.pop(0), "lies outside every slab"),
        (add_reference, "references and table entries differ"),
        (lose_an_entry, "references and table entries differ"),
        (lambda allocator: allocator.tables.clear(), "references and table entries differ"),
        (miscount_slab, "a count is wrong"),
        (miscount_bytes, None),
        (overspend, None),
    ],
)
def test_check_finds_planted_corruption(
    corrupt: Callable[[BlockAllocator], Any], message: str | None
) -> None:
    allocator = new_allocator()
    reserve(allocator.new_table(), 0, 300)
    allocator.ensure_free({"fp16": 2})
    allocator.check()
    corrupt(allocator)
    with pytest.raises(AssertionError, match=message):
        allocator.check()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "256", None])
def test_bad_sizes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"page_size must be a positive integer, got {value!r}"):
        BlockAllocator(ByteBudget(100), 10, value)
    with pytest.raises(ValueError, match=f"max_bytes must be a positive integer, got {value!r}"):
        ByteBudget(value)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10"])
def test_bad_block_bytes_are_refused(value: Any) -> None:
    allocator = BlockAllocator(ByteBudget(100), 1)
    for attempt in (
        lambda: BlockAllocator(ByteBudget(100), value),
        lambda: allocator.set_block_bytes({"fp16": value}),
    ):
        with pytest.raises(
            ValueError, match=f"block_bytes must be a positive integer, got {value!r}"
        ):
            attempt()


def test_a_negative_count_is_refused() -> None:
    allocator = BlockAllocator(ByteBudget(100), 1)
    with pytest.raises(ValueError, match="count must not be negative, got -1"):
        allocator.allocate(-1)
    assert allocator.capacity == 0


def test_a_budget_never_counts_beyond_its_limits() -> None:
    budget = ByteBudget(100)
    budget.take(100)
    for nbytes in (1, -101):
        with pytest.raises(AssertionError):
            budget.take(nbytes)
    assert (budget.mapped, budget.left) == (100, 0)
