"""Checks the invariants of the numbers in any snapshot."""

from collections.abc import Iterable

from paged_kv.allocator.allocator_stats import AllocatorStats
from paged_kv.allocator.block_allocator import BlockTable


def assert_invariants(stats: AllocatorStats, mapped: int) -> None:
    """Check that every mapped byte is in exactly one place."""
    for each in stats.formats:
        assert min(each[1:]) >= 0, each
        assert each.last_block_slots + each.out_of_window_slots <= each.used * each.page_size
        assert each.compactable <= each.used + each.cached + each.spare + each.fragmented
    assert stats.bytes_mapped == mapped
    active = stats.bytes_allocated + stats.bytes_last_block + stats.bytes_out_of_window
    assert active == stats.bytes_active
    held = stats.bytes_active + stats.bytes_retained
    assert held + stats.bytes_spare + stats.bytes_fragmented == mapped
    assert 0 <= stats.internal_fragmentation <= 1
    assert 0 <= stats.external_fragmentation <= 1


def live_rows(lengths: Iterable[tuple[BlockTable, int]], page_size: int) -> dict[int, int]:
    """The slots of each block that hold tokens, for tables of so many tokens and no ring."""
    slots: dict[int, int] = {}
    for table, tokens in lengths:
        for page, block in enumerate(table.blocks):
            mine = min(page_size, tokens - page * page_size)
            slots[block] = max(slots.get(block, 0), mine)
    return slots


def used_rows(stats: AllocatorStats) -> int:
    """Slots of live tokens, computed from the counts of a snapshot."""
    idle = sum(each.last_block_slots + each.out_of_window_slots for each in stats.formats)
    return sum(each.used * each.page_size for each in stats.formats) - idle
