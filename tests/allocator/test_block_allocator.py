"""The allocator: block states, order, slabs, and refused calls without side effects."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import BlockStateError, PoolExhausted
from paged_kv.allocator.slabs import Rewrite, slab_of
from tests.support.reserving import reserve

# The id of the first block of slab 1; those of slab 0 begin at 0.
S1 = 65536
BLOCK_BYTES = 10


def new_allocator(blocks: int = 1000, **callbacks: Any) -> BlockAllocator:
    return BlockAllocator(ByteBudget(blocks * BLOCK_BYTES), BLOCK_BYTES, 256, **callbacks)


def state(allocator: BlockAllocator) -> Any:
    """The state that a refused call must not change."""
    tables = {id(table): list(table.blocks) for table in allocator.tables}
    mapped, slabs = allocator.budget.mapped, dict(allocator.slabs)
    formats = [(list(each.free), dict(each.used), each.block_bytes) for each in allocator.formats]
    return formats, dict(allocator.refs.counts), slabs, mapped, tables


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


def test_allocation_is_all_or_nothing() -> None:
    log = SlabLog()
    allocator = log.new_allocator(blocks=10)
    allocator.allocate(3)
    before = state(allocator)
    with pytest.raises(PoolExhausted) as error:
        allocator.allocate(8)
    found = error.value
    assert (found.needed, found.free, found.evictable, found.budget) == (8, 7, 0, 100)
    assert state(allocator) == before
    assert log.mapped == [0, 1, 2]
    assert allocator.stats().allocation_failures == 1
    assert len(allocator.allocate(7)) == 7


def test_a_block_that_is_not_used_is_refused_and_nothing_changes() -> None:
    allocator = new_allocator()
    allocator.release(allocator.allocate(4)[2:])
    allocator.refs.retain([1])
    before = state(allocator)
    for call, blocks, block, found in (
        (allocator.refs.retain, [0, 2], 2, "free"),
        (allocator.refs.retain, [0, -1], -1, "unknown to this pool"),
        (allocator.release, [1, 0, S1], S1, "unknown to this pool"),
        (allocator.release, [0, 1, 0], 0, "free"),
        (allocator.release, [1, 1, 0, 1], 1, "free"),
    ):
        with pytest.raises(BlockStateError) as error:
            call(blocks)
        assert (error.value.block, error.value.state) == (block, found)
        assert state(allocator) == before


def test_a_block_that_moves_takes_its_references_along() -> None:
    """One that a table holds and the prefix index keeps, one that is cached, and one of a table."""
    allocator = new_allocator()
    allocator.add_format("q8", BLOCK_BYTES // 2)
    table, other = allocator.new_table(), allocator.new_table()
    reserve(other, 0, 1)
    reserve(table, 0, 2 * 256)
    found: list[tuple[int, int]] = []
    for block in table.blocks:
        allocator.refs.keep(block, lambda *move: found.append(move))
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


@pytest.mark.parametrize(
    ("blocks", "needed", "sizes"),
    [
        (1000, 5, [5]),
        (1000, 9, [4, 5]),
        (1000, 100, [12] * 4 + [13] * 4),
        (30, 30, [3] * 10),
        (3, 3, [1, 1, 1]),
    ],
)
def test_a_step_maps_slabs_of_an_eighth_of_it_and_of_the_budget(
    blocks: int, needed: int, sizes: list[int]
) -> None:
    log = SlabLog()
    log.new_allocator(blocks).allocate(needed)
    assert log.sizes == sizes


def test_slabs_grow_by_a_64th_of_what_is_held() -> None:
    log = SlabLog()
    allocator = log.new_allocator()
    allocator.allocate(63)
    held = [(allocator.allocate(1), allocator.capacity)[1] for _ in range(240)]
    idle = [capacity - used for used, capacity in enumerate(held, 64)]
    assert all(each < used / 64 for used, each in enumerate(idle, 64))
    # Page by page up to 128, by two up to 192, and by three.
    assert len(log.sizes) == 8 + 65 + 32 + 34


def test_growth_ahead_leaves_the_budget_to_other_needs() -> None:
    allocator = new_allocator(blocks=390)
    allocator.add_format("q8", BLOCK_BYTES // 2)
    allocator.allocate(384)
    allocator.ensure_free({"fp16": 1, "q8": 6})
    assert [len(each.free) for each in allocator.formats] == [3, 6]
    assert allocator.budget.left == 0


def test_blocks_beyond_an_eighth_of_the_used_ones_are_given_back() -> None:
    for released, left in ((1, 20), (3, 19), (7, 14), (20, 0)):
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


def test_blocks_are_free_before_a_slab_is_unmapped_which_may_fail() -> None:
    def fail(slab: int) -> None:
        raise MemoryError("planted")

    allocator = new_allocator(unmap_slab=fail)
    allocator.add_format("q8", BLOCK_BYTES // 2)
    blocks = allocator.allocate(1) + allocator.allocate(1, "q8")
    with pytest.raises(MemoryError, match="planted"):
        allocator.release(blocks)
    assert allocator.stats().blocks_used == 0


def test_coming_and_going_at_the_edge_of_a_slab_maps_it_once() -> None:
    log = SlabLog()
    allocator = log.new_allocator()
    allocator.allocate(4)
    for _ in range(5):
        allocator.release(allocator.allocate(1))
    assert (log.mapped, log.unmapped) == ([0, 1], [])


def test_a_step_of_several_slabs_joins_those_of_its_own_format() -> None:
    """No slab can grow by four pages where none may have more than four."""
    log = SlabLog()
    allocator = log.new_allocator(32, max_slabs=5, rewrite_slabs=log.rewrite)
    for _ in range(4):
        allocator.allocate(1)
    allocator.ensure_free({"fp16": 12})
    assert log.sizes == [1, 1, 1, 1, 4, 4, 4, 4]
    assert sorted(allocator.slabs.values()) == [4, 4, 4, 4]


@pytest.mark.parametrize("fail_at", [1, 3, 5])
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


def lose_an_entry(allocator: BlockAllocator) -> None:
    table = next(iter(allocator.tables))
    table.blocks = table.blocks[:-1]


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda allocator: allocator.formats[0].free.add(S1),
        lambda allocator: allocator.formats[0].free.add(0),
        lambda allocator: allocator.formats[0].free.remove(S1),
        lambda allocator: allocator.formats[0].free.add(99),
        lambda allocator: allocator.formats[0].slabs.pop(0),
        lambda allocator: allocator.refs.counts.update({1: 2}),
        lambda allocator: allocator.tables.clear(),
        lambda allocator: allocator.formats[0].used.update({0: 9}),
        lambda allocator: setattr(allocator.budget, "mapped", allocator.budget.mapped - 1),
        lambda allocator: setattr(allocator.budget, "max_bytes", allocator.budget.mapped - 1),
        lose_an_entry,
    ],
)
def test_check_finds_planted_corruption(corrupt: Callable[[BlockAllocator], Any]) -> None:
    allocator = new_allocator()
    reserve(allocator.new_table(), 0, 300)
    allocator.ensure_free({"fp16": 2})
    allocator.check()
    corrupt(allocator)
    with pytest.raises(AssertionError):
        allocator.check()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "256", None])
def test_bad_sizes_are_refused(value: Any) -> None:
    allocator = BlockAllocator(ByteBudget(100), 1)
    for name, attempt in (
        ("page_size", lambda: BlockAllocator(ByteBudget(100), 10, value)),
        ("max_bytes", lambda: ByteBudget(value)),
        ("block_bytes", lambda: BlockAllocator(ByteBudget(100), value)),
        ("block_bytes", lambda: allocator.set_block_bytes({"fp16": value})),
    ):
        with pytest.raises(ValueError, match=f"{name} must be a positive integer, got {value!r}"):
            attempt()
