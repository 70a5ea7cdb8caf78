"""Reserves blocks of a single table."""

from collections.abc import Mapping

from paged_kv.allocator.block_allocator import BlockTable
from paged_kv.allocator.writes import CopyPages, Write, reserve_all


def reserve(
    table: BlockTable, start: int, end: int, copy_pages: CopyPages = lambda copies: None
) -> Mapping[int, int]:
    """Reserve blocks for the tokens at [start, end); see `reserve_all`. Returns the copies (from
    block, to block)."""
    copies: dict[int, int] = {}

    def record(made: Mapping[int, int]) -> None:
        copy_pages(made)
        copies.update(made)

    reserve_all([([Write(table, start, end)], record)])
    return copies
