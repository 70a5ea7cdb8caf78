"""What a step shares with its sequences and reads, so that none of them holds another."""

from __future__ import annotations

from paged_kv.allocator.block_table import BlockTable
from paged_kv.pool.layer_group import LayerGroup


class Scratch(dict[LayerGroup, dict[str, BlockTable]]):
    """One block for each sequence, by uid, whose step begins within a page and leaves it: see
    `Write.needs_scratch`. Whoever drops it gives the blocks back, at the next call of their
    allocators."""

    def __del__(self) -> None:
        for tables in self.values():
            for table in tables.values():
                table.allocator.drop_later(table)


class Transaction:
    """Whether a step still holds: no sequence has changed in another way since it began.

    Attributes:
        is_open: whether it does.
        is_unread: whether attention has not read the latest layer's keys and values yet, where it
            must.
        scratch: blocks that an open step needs beside the block tables.
    """

    __slots__ = ("is_open", "is_unread", "scratch")

    def __init__(self) -> None:
        self.is_open = True
        self.is_unread = False
        self.scratch: Scratch | None = None
