"""Block tables: the entries that a write needs, copies of shared blocks, and the end of tables."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.allocator.block_allocator import BlockAllocator, BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.writes import Write, blocks_needed, planned
from tests.support.examples import examples
from tests.support.reserving import reserve


def new_allocator(blocks: int = 1000, page_size: int = 256, **callbacks: Any) -> BlockAllocator:
    allocator = BlockAllocator(ByteBudget(blocks), 1, page_size, **callbacks)
    allocator.ensure_free({"fp16": 4})
    return allocator


def new_table(allocator: BlockAllocator, tokens: int) -> BlockTable:
    table = allocator.new_table()
    assert reserve(table, 0, tokens) == {}
    return table


def test_a_page_that_is_shared_again_is_copied_again() -> None:
    """As after a `ThreadConflict`: the copy was not made, so its source stays in the table."""
    allocator = new_allocator()
    table = new_table(allocator, 5)
    fork = allocator.fork(table)
    copies = reserve(fork, 5, 6)
    assert copies == {0: 1}
    fork.exchange({copy: source for source, copy in copies.items()})
    assert fork.blocks == table.blocks
    assert not fork.is_reserved(6), "the next write would change the other's page"
    assert set(reserve(fork, 5, 6)) == {0}
    allocator.check()


def test_blocks_of_collected_tables_are_appended() -> None:
    allocator = new_allocator(blocks=4)
    table = allocator.new_table()
    allocator.drop_later(new_table(allocator, 1000))
    table.append(["fp16"] * 4)
    assert len(table.blocks) == 4
    allocator.check()


def test_what_was_reserved_is_looked_at_again_once_it_may_be_shared_or_gone() -> None:
    allocator = new_allocator()
    table = new_table(allocator, 300)
    assert [table.is_reserved(end) for end in (299, 300, 301)] == [True, True, False]
    fork = allocator.fork(table)
    assert not table.is_reserved(300)
    assert not fork.is_reserved(1)
    assert reserve(table, 299, 300) == {1: 2}
    assert table.is_reserved(300)
    table.truncate(299)
    assert not table.is_reserved(299)
    reserve(table, 299, 300)
    table.rewind(290)
    assert not table.is_reserved(299)


def allocated_by(allocator: BlockAllocator, writes: list[Write]) -> int:
    """The number of additional blocks in use after reserving. The source of a copy stays in use if
    other tables hold it."""
    before = allocator.stats().blocks_used
    for write in writes:
        reserve(write.table, write.start, write.end)
    allocator.check()
    return allocator.stats().blocks_used - before


spans = st.tuples(st.integers(0, 20), st.integers(1, 12))


@examples(100)
@given(
    first=st.integers(0, 24),
    grown=st.lists(spans, max_size=3),
    written=st.lists(st.none() | spans, min_size=5, max_size=5),
)
def test_blocks_needed_is_exact_for_tables_that_share_some_blocks(
    first: int, grown: list[tuple[int, int]], written: list[tuple[int, int] | None]
) -> None:
    allocator = new_allocator(page_size=4)
    tables = [new_table(allocator, first)]
    for start, count in grown:
        tables.append(allocator.fork(tables[-1]))
        reserve(tables[-1], start, start + count)
    tables.append(allocator.fork(tables[0]))
    writes = [
        Write(table, span[0], sum(span))
        for table, span in zip(tables, written, strict=False)
        if span is not None
    ]
    assert blocks_needed(writes).total() == allocated_by(allocator, writes)


def test_a_fork_that_a_finaliser_drops_during_reserve_leaves_the_source_of_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The garbage collector can run at any point; here it runs between the plan and the
    allocation."""
    allocator = new_allocator()
    table = new_table(allocator, 256)
    doomed = allocator.fork(table)
    written_entries = Write.written_entries

    def collect_and_plan(write: Write) -> dict[int, str]:
        entries = written_entries(write)
        allocator.drop_later(doomed)
        return entries

    monkeypatch.setattr(Write, "written_entries", collect_and_plan)
    copies = reserve(table, 0, 1)
    assert copies == {0: 1}
    assert allocator.ref_count(0) == 1
    allocator.check()
    assert allocator.ref_count(0) == 0


def test_a_table_left_by_a_finaliser_is_dropped_at_the_next_call() -> None:
    calls: list[Callable[[BlockAllocator], Any]] = [
        BlockAllocator.new_table,
        BlockAllocator.available,
        BlockAllocator.stats,
        BlockAllocator.check,
        BlockAllocator.compact,
        BlockAllocator.tidy,
        BlockAllocator.unmap_empty_slabs,
        lambda allocator: allocator.allocate(0),
        lambda allocator: allocator.ensure_free({"fp16": 1}),
        lambda allocator: allocator.fork(allocator.new_table()),
    ]
    for call in calls:
        allocator = new_allocator()
        table = allocator.new_table()
        reserve(table, 0, 300)
        allocator.drop_later(table)
        assert (allocator.ref_count(0), table.blocks) == (1, (0, 1))
        call(allocator)
        assert (allocator.ref_count(0), table.blocks) == (0, ())
        assert table not in allocator.tables


def test_tables_may_be_dropped_from_another_thread_during_allocations() -> None:
    allocator = new_allocator()
    tables = [allocator.new_table() for _ in range(500)]
    for table in tables:
        reserve(table, 0, 1)
    both_began = threading.Barrier(2)

    def drop_all() -> None:
        both_began.wait()
        for table in tables:
            allocator.drop_later(table)

    thread = threading.Thread(target=drop_all)
    thread.start()
    both_began.wait()
    while thread.is_alive():
        allocator.release(allocator.allocate(100))
    thread.join()
    allocator.check()
    assert (allocator.stats().blocks_used, allocator.tables) == (0, set())


def test_dropping_a_table_twice_frees_its_blocks_once() -> None:
    allocator = new_allocator()
    table = allocator.new_table()
    reserve(table, 0, 300)
    for drop in (allocator.drop_later, allocator.drop_later, allocator.drop, allocator.drop):
        drop(table)
    assert allocator.allocate(2) == [0, 1]
    assert allocator.capacity == 2


def test_tokens_that_a_table_has_are_reserved_once() -> None:
    allocator = new_allocator()
    table = allocator.new_table()
    for _ in range(2):
        reserve(table, 0, 5)
    assert allocator.tokens_reserved == 5


def recoding_allocator() -> BlockAllocator:
    allocator = BlockAllocator(ByteBudget(1000), 4, 4)
    allocator.add_format("q8", 2)
    allocator.add_format("q4", 1)
    return allocator


@pytest.mark.parametrize(
    ("start", "end", "appended", "scratch"),
    [
        (0, 12, ["q8", "q4", "fp16"], None),
        (0, 4, ["fp16"], None),
        (0, 5, ["q8", "fp16"], None),
        (3, 12, ["q4", "fp16"], "q8"),
        (4, 12, ["q4", "fp16"], None),
        (5, 12, ["fp16"], "q4"),
    ],
)
def test_a_write_asks_for_the_format_of_each_full_block(
    start: int, end: int, appended: list[str], scratch: str | None
) -> None:
    allocator = recoding_allocator()
    table = allocator.new_table(page_format="q4", first_format="q8")
    if start:
        reserve(table, 0, start)
    write = Write(table, start, end)
    assert planned([write])[0].appended == appended
    assert write.needs_scratch == (scratch is not None)
    if scratch:
        assert write.scratch_format == scratch
    assert allocator.fork(table).full_formats == ("q8", "q4")
