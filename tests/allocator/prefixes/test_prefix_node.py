"""Cached out-of-window blocks: the order of their eviction, and the blocks that stay."""

import random
from collections.abc import Callable

from paged_kv.allocator.block_allocator import BlockAllocator, BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes.eviction import LeastRecentlyUsed
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.prefixes.prefix_node import OutOfWindowBlock, OutOfWindowBlocks, WindowSlots
from tests.support.reserving import reserve


class Retired:
    """Blocks that left a window one after the other, each of another table."""

    def __init__(self, count: int) -> None:
        self.allocator = BlockAllocator(ByteBudget(1000), 1, 4)
        self.allocator.ensure_free({"fp16": count})
        self.blocks = OutOfWindowBlocks(LeastRecentlyUsed())
        self.tables: list[BlockTable] = []
        self.known: list[OutOfWindowBlock] = []
        for _ in range(count):
            table = self.allocator.new_table()
            reserve(table, 0, 4)
            self.tables.append(table)
            self.known.append(self.blocks.cache(self.allocator, table.blocks[0]))

    def drop_tables(self) -> None:
        for table in self.tables:
            self.allocator.drop(table)
        self.tables.clear()

    def there(self) -> list[int]:
        return [
            at for at, out_of_window in enumerate(self.known) if out_of_window.block is not None
        ]


def after(count: int) -> Callable[[], bool]:
    """Returns False so many times, then True."""
    return iter([*[False] * count, True]).__next__


def test_the_longest_unused_goes_first() -> None:
    """Only the last use of a block counts, whatever the order of uses."""
    rng = random.Random(1)
    for _ in range(5):
        out_of_window = Retired(8)
        out_of_window.drop_tables()
        order = list(range(8))
        for used in rng.choices(range(8), k=12):
            out_of_window.blocks.touch(out_of_window.known[used])
            order.remove(used)
            order.append(used)
        for gone in range(1, 9):
            assert out_of_window.blocks.evict(after(1)) == 1
            assert out_of_window.there() == sorted(order[gone:])
        out_of_window.allocator.check()


def test_what_a_table_holds_goes_last_and_stays_with_the_table() -> None:
    out_of_window = Retired(4)
    for table in out_of_window.tables[2:]:
        out_of_window.allocator.drop(table)
    assert out_of_window.blocks.evictable(out_of_window.allocator) == [2, 3]
    assert out_of_window.blocks.evict(after(2)) == 2
    assert out_of_window.there() == [0, 1]
    assert out_of_window.blocks.evict(lambda: False) == 2
    assert out_of_window.there() == []
    assert [table.blocks for table in out_of_window.tables[:2]] == [(0,), (1,)]
    assert out_of_window.allocator.stats().blocks_used == 2
    out_of_window.allocator.check()


def test_ends_and_pinned_blocks_stay() -> None:
    out_of_window = Retired(4)
    out_of_window.drop_tables()
    out_of_window.known[0].ends = 1
    out_of_window.known[1].pins = 1
    # `evictable` counts block 0, where a prefix ends, but not block 1, which is pinned.
    assert out_of_window.blocks.evictable(out_of_window.allocator) == [0, 2, 3]
    assert out_of_window.blocks.evict(lambda: False) == 2
    assert out_of_window.there() == [0, 1]
    out_of_window.known[0].ends = out_of_window.known[1].pins = 0
    assert out_of_window.blocks.evict(lambda: False) == 2
    assert out_of_window.allocator.stats().blocks_cached == 0


def insert(index: PrefixIndex, out_of_window: Retired, at: int, *, is_end: bool = False) -> None:
    """A page of tokens: all slots of one of the blocks."""
    slots = WindowSlots(out_of_window.known[at], 0, 4, is_end)
    index.insert("", [1, 2, 3, 4], [{}], [{out_of_window.allocator: [slots]}])


def test_a_prefix_counts_its_ends_and_pins_as_long_as_it_is_known() -> None:
    """Of the same slots, the node holds the first, or the first that are an end."""
    out_of_window, index = Retired(4), PrefixIndex(4)
    for at, is_end, expected in (
        (0, False, [0, 0, 0, 0]),
        (1, True, [0, 1, 0, 0]),
        (2, False, [0, 1, 0, 0]),
        (3, True, [0, 1, 0, 0]),
    ):
        insert(index, out_of_window, at, is_end=is_end)
        assert [each.ends for each in out_of_window.known] == expected
    (node,) = index.nodes()
    node.add_pins(1)
    assert [each.pins for each in out_of_window.known] == [0, 1, 0, 0]
    assert index.evict(lambda: False) == index.forget() == 0
    node.add_pins(-1)
    index.forget()
    assert [(each.ends, each.pins) for each in out_of_window.known] == [(0, 0)] * 4


def test_slots_of_evicted_blocks_are_held_again_elsewhere() -> None:
    out_of_window, index = Retired(2), PrefixIndex(4)
    insert(index, out_of_window, 0)
    out_of_window.drop_tables()
    assert out_of_window.blocks.evict(after(1)) == 1
    insert(index, out_of_window, 1)
    (node,) = index.nodes()
    assert [slots.out_of_window for slots in node.slots_of(out_of_window.allocator)] == [
        out_of_window.known[1]
    ]
