"""A block's worth of tokens in the prefix index, and what is known of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from sortedcontainers import SortedDict

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlock

Blocks = Mapping[BlockAllocator, int]
"""The block of each group that holds the same tokens."""


@dataclass(frozen=True)
class WindowRows:
    """Some of a node's tokens, in a block of a group whose layers see a window.

    Attributes:
        retired: the block; of its rows those from `first` on, up to but not `last`.
        is_end: whether a prefix ended here, so that its window is of use as long as it is known.
    """

    out_of_window: OutOfWindowBlock
    first: int
    last: int
    is_end: bool


Windows = Mapping[BlockAllocator, Sequence[WindowRows]]
"""What each group with a window has of the same tokens."""


class Checkpoint(Protocol):
    """What one can go on with behind a token, for whoever knows what that is.

    Attributes:
        pins: how often it was pinned.
    """

    pins: int


@dataclass(eq=False)
class Node:
    """One block of a prefix.

    Attributes:
        tokens: what the block holds, a full block's tokens or, in a leaf, fewer.
        blocks: the block of each group whose sequences hold all their tokens.
        parent: what comes before; None for a root, which has no tokens.
        children: what comes after, by their tokens.
        windows: what is held in groups with a window, by the rows that these are.
        checkpoints: what one can go on with behind so many of its tokens.
        last_used: larger the later it was matched or inserted.
        pins: how often it was pinned.
    """

    tokens: tuple[int, ...]
    blocks: dict[BlockAllocator, int]
    parent: Node | None
    children: SortedDict[tuple[int, ...], Node] = field(default_factory=SortedDict)
    windows: dict[BlockAllocator, dict[tuple[int, int], WindowRows]] = field(default_factory=dict)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    last_used: int = 0
    pins: int = 0

    def rows_of(self, allocator: BlockAllocator) -> list[WindowRows]:
        """What there is still in a group with a window."""
        known = self.windows.get(allocator, {}).values()
        return [rows for rows in known if rows.out_of_window.block is not None]

    def hold(self, allocator: BlockAllocator, rows: WindowRows) -> None:
        """Hold rows of a group with a window, unless the same ones are held."""
        held = self.windows.setdefault(allocator, {})
        known = held.get((rows.first, rows.last))
        if known is not None:
            is_there = known.out_of_window.block is not None
            if is_there and known.is_end >= rows.is_end:
                return
            self._count(known, -1)
        held[rows.first, rows.last] = rows
        self._count(rows, 1)

    def hold_checkpoint(self, end: int, checkpoint: Checkpoint) -> None:
        """Hold what one can go on with behind the first `end` tokens, in the place of another."""
        replaced = self.checkpoints.get(end)
        if replaced is not None:
            replaced.pins -= self.pins
        self.checkpoints[end] = checkpoint
        checkpoint.pins += self.pins

    def inherit(self, shorter: Node) -> None:
        """Hold what another one does, which holds the first of these tokens."""
        for end, checkpoint in shorter.checkpoints.items():
            self.hold_checkpoint(end, checkpoint)
        for allocator, held in shorter.windows.items():
            for rows in held.values():
                self.hold(allocator, rows)

    def let_go(self) -> None:
        """Hold nothing of any window any more."""
        for rows in self._all_rows():
            self._count(rows, -1)
        self.windows.clear()

    def add_pins(self, change: int) -> None:
        """Pin this and what it holds so many times more."""
        self.pins += change
        for rows in self._all_rows():
            rows.out_of_window.pins += change
        for checkpoint in self.checkpoints.values():
            checkpoint.pins += change

    def _all_rows(self) -> Iterable[WindowRows]:
        return chain.from_iterable(held.values() for held in self.windows.values())

    def _count(self, rows: WindowRows, change: int) -> None:
        rows.out_of_window.ends += change * rows.is_end
        rows.out_of_window.pins += change * self.pins
