"""Block tables: the entries that a write needs, copies of shared blocks, and the end of tables."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.events import Events
from paged_kv.allocator.writes import Write, blocks_needed, reserve
from tests.support.examples import examples

# The id of the first block of slab 1; those of slab 0 begin at 0.
S1 = 65536


def new_allocator(blocks: int = 1000, page_size: int = 256, **callbacks: Any) -> BlockAllocator:
    allocator = BlockAllocator(ByteBudget(blocks), 1, page_size, **callbacks)
    allocator.ensure_free({"fp16": 4})
    return allocator


def new_table(allocator: BlockAllocator, tokens: int) -> BlockTable:
    table = allocator.new_table()
    assert reserve(table, 0, tokens) == {}
    return table


@pytest.mark.parametrize(
    ("tokens", "entries"),
    [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (511, 2), (512, 2), (513, 3)],
)
def test_a_table_has_as_many_entries_as_its_tokens_need(tokens: int, entries: int) -> None:
    allocator = new_allocator()
    table = new_table(allocator, tokens)
    assert table.blocks == (0, 1, 2)[:entries]
    longer = new_table(allocator, 1000)
    longer.truncate(tokens)
    assert len(longer.blocks) == entries
    allocator.check()


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


def test_a_block_is_appended_with_the_first_token_behind_the_last_one() -> None:
    table = new_table(new_allocator(), 255)
    lengths = []
    for start in (255, 256, 257):
        reserve(table, start, start + 1)
        lengths.append(len(table.blocks))
    assert lengths == [1, 2, 2]


def test_reserving_what_is_owned_changes_nothing() -> None:
    table = new_table(new_allocator(), 600)
    for start, end in ((0, 600), (599, 768), (300, 300)):
        assert reserve(table, start, end) == {}
        assert table.blocks == (0, 1, 2)


def test_truncating_frees_the_tail_only() -> None:
    allocator = new_allocator()
    table = new_table(allocator, 1000)
    for tokens, blocks in ((2000, [0, 1, 2, 3]), (513, [0, 1, 2]), (512, [0, 1]), (0, [])):
        table.truncate(tokens)
        assert list(table.blocks) == blocks
        assert [allocator.ref_count(block) for block in range(4)] == [
            int(block in blocks) for block in range(4)
        ]


def test_truncating_a_fork_takes_its_references_only() -> None:
    allocator = new_allocator()
    table = new_table(allocator, 600)
    fork = allocator.fork(table)
    fork.truncate(256)
    assert (table.blocks, fork.blocks) == ((0, 1, 2), (0,))
    assert [allocator.ref_count(block) for block in table.blocks] == [2, 1, 1]
    allocator.check()


def test_a_fork_shares_every_block() -> None:
    allocator = new_allocator()
    table = new_table(allocator, 600)
    fork = allocator.fork(table)
    assert fork.blocks == table.blocks
    assert [allocator.ref_count(block) for block in table.blocks] == [2, 2, 2]
    allocator.drop(table)
    assert fork.blocks == (0, 1, 2)
    assert [allocator.ref_count(block) for block in fork.blocks] == [1, 1, 1]
    allocator.check()


@pytest.mark.parametrize(
    ("start", "end", "copies", "blocks"),
    [
        (0, 1, {0: 2}, [2, 1]),
        (254, 255, {0: 2}, [2, 1]),
        (255, 256, {0: 2}, [2, 1]),
        (255, 257, {0: 2, 1: 3}, [2, 3]),
        (256, 257, {1: 2}, [0, 2]),
        (511, 513, {1: 2}, [0, 2, 3]),
        (512, 513, {}, [0, 1, 2]),
        (0, 600, {0: 2, 1: 3}, [2, 3, S1]),
        (512, 512, {}, [0, 1]),
    ],
)
def test_only_shared_blocks_that_are_written_are_copied(
    start: int, end: int, copies: dict[int, int], blocks: list[int]
) -> None:
    allocator = new_allocator()
    table = new_table(allocator, 512)
    fork = allocator.fork(table)
    assert reserve(fork, start, end) == copies
    assert (list(fork.blocks), table.blocks) == (blocks, (0, 1))
    assert [allocator.ref_count(block) for block in (0, 1)] == [2 - (b in copies) for b in (0, 1)]
    assert allocator.cow_copies == len(copies)
    allocator.check()


def test_the_last_table_to_write_a_shared_block_keeps_it() -> None:
    allocator = new_allocator()
    table = new_table(allocator, 10)
    first, second = allocator.fork(table), allocator.fork(table)
    assert [reserve(each, 9, 11) for each in (second, table, first)] == [{0: 1}, {0: 2}, {}]
    assert [each.blocks for each in (table, first, second)] == [(2,), (0,), (1,)]
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


def test_a_fork_of_an_empty_table_is_empty() -> None:
    allocator = new_allocator()
    fork = allocator.fork(allocator.new_table())
    assert fork.blocks == ()
    assert reserve(fork, 0, 1) == {}
    allocator.check()


@pytest.mark.parametrize(
    ("forks", "ranges", "needed"),
    [
        (0, [], 0),
        (0, [(600, 601)], 0),
        (0, [(600, 769)], 1),
        (1, [(600, 601)], 1),
        (1, [(600, 601), (600, 601)], 1),
        (2, [(600, 601), (600, 601)], 2),
        (2, [(600, 601)] * 3, 2),
        (1, [(0, 769), (0, 769)], 3 + 2),
        (2, [(0, 256), (255, 257), (512, 1025)], 1 + 2 + 1 + 2),
        (2, [(768, 1025)] * 3, 6),
    ],
)
def test_blocks_needed_is_what_reserving_allocates(
    forks: int, ranges: list[tuple[int, int]], needed: int
) -> None:
    allocator = new_allocator()
    table = new_table(allocator, 600)
    tables = [table, *(allocator.fork(table) for _ in range(forks))]
    writes = [Write(table, *span) for table, span in zip(tables, ranges, strict=False)]
    assert blocks_needed(writes).total() == needed
    assert allocated_by(allocator, writes) == needed


def allocated_by(allocator: BlockAllocator, writes: list[Write]) -> int:
    """The number of additional blocks in use after reserving. The source of a copy stays in use if
    other tables hold it."""
    before = allocator.stats().blocks_used
    for write in writes:
        reserve(write.table, write.start, write.end)
    allocator.check()
    return allocator.stats().blocks_used - before


spans = st.tuples(st.integers(0, 20), st.integers(1, 12))


@examples(200)
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


def test_exhaustion_in_reserve_changes_nothing() -> None:
    allocator = new_allocator(blocks=6)
    table = new_table(allocator, 4 * 256)
    fork = allocator.fork(table)
    before = allocator.stats()
    with pytest.raises(PoolExhausted) as error:
        reserve(fork, 256, 4 * 256)
    assert (error.value.needed, error.value.free, error.value.budget) == (3, 2, 6)
    assert table.blocks == fork.blocks
    after = allocator.stats()
    assert (after.blocks_used, after.blocks_shared, after.cow_copies) == (4, 4, 0)
    assert after.bytes_mapped == before.bytes_mapped
    allocator.check()
    assert len(reserve(fork, 2 * 256, 4 * 256)) == 2


def test_a_slab_that_cannot_be_mapped_changes_no_table() -> None:
    def map_slab(slab: int, pages: int, page_format: str) -> None:
        if slab == 2:
            raise MemoryError("planted")

    allocator = new_allocator(map_slab=map_slab)
    table = new_table(allocator, 3 * 256)
    fork = allocator.fork(table)
    with pytest.raises(MemoryError, match="planted"):
        reserve(fork, 0, 20 * 256)
    assert table.blocks == fork.blocks == (0, 1, 2)
    assert (allocator.cow_copies, allocator.slabs) == (0, {0: 4})
    allocator.check()


def test_a_fork_that_was_left_to_be_dropped_shares_nothing_with_a_write() -> None:
    allocator = new_allocator(blocks=4)
    table = new_table(allocator, 4 * 256)
    allocator.drop_later(allocator.fork(table))
    assert reserve(table, 0, 4 * 256) == {}
    allocator.drop_later(allocator.fork(table))
    assert blocks_needed([Write(table, 0, 4 * 256)]).total() == 0


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


@pytest.mark.parametrize(
    "call",
    [
        lambda allocator: allocator.new_table(),
        lambda allocator: allocator.allocate(0),
        lambda allocator: allocator.ensure_free({"fp16": 1}),
        lambda allocator: allocator.available(),
        lambda allocator: allocator.stats(),
        lambda allocator: allocator.check(),
        lambda allocator: allocator.compact(),
        lambda allocator: allocator.tidy(),
        lambda allocator: allocator.unmap_empty_slabs(),
        lambda allocator: allocator.fork(allocator.new_table()),
    ],
)
def test_a_table_left_by_a_finaliser_is_dropped_at_the_next_call(
    call: Callable[[BlockAllocator], Any],
) -> None:
    allocator = new_allocator()
    table = allocator.new_table()
    reserve(table, 0, 300)
    allocator.drop_later(table)
    assert (allocator.ref_count(0), table.blocks) == (1, (0, 1))
    call(allocator)
    assert (allocator.ref_count(0), table.blocks) == (0, ())
    assert table not in allocator.tables


def test_a_finaliser_in_the_middle_of_an_allocation_frees_after_it() -> None:
    def map_slab(slab: int, pages: int, page_format: str) -> None:
        if slab:
            allocator.drop_later(doomed)

    allocator = new_allocator(map_slab=map_slab)
    doomed = allocator.new_table()
    reserve(doomed, 0, 3 * 256)
    table = allocator.new_table()
    reserve(table, 0, 3 * 256)
    assert table.blocks == (3, S1, S1 + 1)
    assert doomed.blocks == (0, 1, 2)
    assert allocator.stats().blocks_used == 3
    assert not doomed.blocks
    allocator.check()


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


def test_tokens_that_a_table_has_are_reserved_and_told_once() -> None:
    events = Told()
    allocator = new_allocator(events=events)
    table = allocator.new_table()
    for _ in range(2):
        reserve(table, 0, 5)
    assert allocator.tokens_reserved == 5
    assert events.told == [(0, 5)]
    reserve(table, 5, 6)
    assert events.told == [(0, 5), (5, 6)]


class Told(Events):
    """Notes which tokens were written."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def written(self, table: Any, start: int, end: int, appended: int, copied: int) -> None:
        self.told.append((start, end))


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
    assert write.missing_formats() == appended
    assert write.needs_scratch == (scratch is not None)
    if scratch:
        assert write.scratch_format == scratch
    assert allocator.fork(table).full_formats == ("q8", "q4")


def test_full_blocks_that_are_left_are_told_by_the_format_that_they_get() -> None:
    allocator = recoding_allocator()
    table = allocator.new_table(page_format="q4", first_format="q8")
    table.append(["fp16"] * 3)
    first, second, _ = table.blocks
    assert table.unrecoded(3) == {}
    assert table.unrecoded(11) == {"q8": [first], "q4": [second]}
    assert not table.is_recoded(11)
    for block, name in ((first, "q8"), (second, "q4")):
        allocator.ensure_free({name: 1})
        allocator.apply_moves({block: allocator.format_named(name).free[0]})
    assert table.unrecoded(11) == {}
    assert table.is_recoded(11)
    assert not table.is_recoded(12)
    assert table.unrecoded(12) == {"q4": [table.blocks[2]]}


def test_a_table_of_one_format_has_it_in_its_first_block_too() -> None:
    allocator = recoding_allocator()
    assert allocator.new_table(page_format="q4").full_formats == ("q4",)
    written = allocator.new_table()
    assert (written.full_formats, written.recodes) == (("fp16",), False)
    assert (written.is_recoded(100), written.unrecoded(100)) == (True, {})
