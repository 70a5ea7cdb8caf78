"""The cached pages from which a ring can be rebuilt, and those from which it cannot."""

import pytest

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes.prefix_node import Node, OutOfWindowBlocks, WindowSlots
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_kinds import Window
from paged_kv.prefix.window_prefixes import window_prefix
from tests.support.reserving import reserve

# A ring of three pages.
WINDOW = Window(512, 256)


@pytest.mark.parametrize(
    ("slots", "num_tokens", "is_known"),
    [
        ([(0, 256), (0, 256), (0, 50)], 562, True),
        # A page between others lacks slots.
        ([(0, 256), (100, 256), (0, 50)], 562, False),
        ([(0, 256), (0, 256), (10, 50)], 562, False),
        # The oldest page has only the slots that the window has left.
        ([(51, 256), (0, 256), (0, 50)], 562, True),
        ([(52, 256), (0, 256), (0, 50)], 562, False),
        # A page ends too early, or is missing.
        ([(0, 255), (0, 256), (0, 50)], 562, False),
        ([(0, 256), (0, 256), (0, 49)], 562, False),
        ([(0, 256), None, (0, 50)], 562, False),
        # Older pages do not matter.
        ([None, (0, 256), (0, 256), (0, 256)], 1024, True),
        ([(0, 100)], 100, True),
    ],
)
def test_all_that_the_window_sees_must_be_there(
    slots: list[tuple[int, int] | None], num_tokens: int, is_known: bool
) -> None:
    allocator, blocks = BlockAllocator(ByteBudget(1000), 1, PAGE_SIZE), OutOfWindowBlocks()
    table = allocator.new_table()
    reserve(table, 0, len(slots) * PAGE_SIZE)
    out_of_window = [blocks.cache(allocator, block) for block in table.blocks]
    nodes = [Node((), {}, None) for _ in slots]
    for node, page, held in zip(nodes, out_of_window, slots, strict=True):
        if held is not None:
            node.hold(allocator, WindowSlots(page, *held, is_end=False))
    known = window_prefix(nodes, num_tokens, WINDOW, allocator)
    assert (known is not None) == is_known
    if known is not None:
        latest = list(range(max(0, len(slots) - 3), len(slots)))
        assert set(known.pages) == {out_of_window[page] for page in latest}
        assert known.written >= num_tokens
