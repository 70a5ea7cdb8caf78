"""Tells how far a step is. A step and its sequences share it, so that neither holds the other."""

from __future__ import annotations

from paged_kv.allocator.block_table import BlockTable
from paged_kv.pool.layer_group import LayerGroup

Scratch = dict[LayerGroup, dict[str, BlockTable]]
"""One block for each sequence, by uid, whose step begins within a page and leaves it: see
`Write.needs_scratch`."""


class StepProgress:
    """How far a step is.

    Attributes:
        is_open: whether the sequences have not changed otherwise since the step began.
        layers: the layers that have taken the step, in their order.
        is_unread: whether attention has not read the latest layer's keys and values yet, where it
            must.
        scratch: blocks that the step needs beside the block tables.
    """

    __slots__ = ("is_open", "is_unread", "layers", "scratch")

    def __init__(self) -> None:
        self.is_open = True
        self.is_unread = False
        self.layers: list[int] = []
        self.scratch: Scratch = {}

    def __del__(self) -> None:
        if self.scratch:
            drop(self.scratch)

    def close(self) -> None:
        """End the step, because a sequence changes in another way."""
        self.is_open = False
        if self.scratch:
            drop(self.scratch)


def drop(scratch: Scratch) -> None:
    """Release the blocks, at the next call of their allocators."""
    for tables in scratch.values():
        for table in tables.values():
            table.allocator.drop_later(table)
    scratch.clear()
