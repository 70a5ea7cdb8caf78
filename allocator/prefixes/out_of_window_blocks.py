"""Blocks that have left a ring whole.

Their sequence never reads them again, but another one that begins with the same tokens could go on
with them. So they are kept while there is room, and are the first to go when there is none:

    in a ring --retire--> retired --a table retains it--> retired and used
    retired --give_up, or whoever knew of it is gone--> free
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from paged_kv.allocator.block_allocator import BlockAllocator


@dataclass(eq=False)
class _Place:
    """Where a retired block is; None once it was given up."""

    allocator: BlockAllocator
    block: int | None


class OutOfWindowBlock:
    """What those hold who know what a retired block contains. With the last of them it goes.

    Attributes:
        ends: prefixes that end with it, and of which the rest is of little use without: it stays
            as long as they do.
        pins: prefixes with it that were pinned.
    """

    def __init__(self, place: _Place) -> None:
        self.ends = 0
        self.pins = 0
        self._place = place

    @property
    def block(self) -> int | None:
        """The block, or None if it was given up."""
        return self._place.block


class OutOfWindowBlocks:
    """All retired blocks of a pool. They are used under the lock of the blocks' allocators."""

    def __init__(self) -> None:
        # In the order in which they were retired or last used.
        self._known: dict[_Place, weakref.ref[OutOfWindowBlock]] = {}
        self._places: dict[tuple[BlockAllocator, int], _Place] = {}
        self._dropped: deque[_Place] = deque()

    def cache(self, allocator: BlockAllocator, block: int) -> OutOfWindowBlock:
        """Keep a block that is in use; one that is retired already stays the same."""
        self.drain()
        place = self._places.get((allocator, block))
        known = None if place is None else self._known[place]()
        if known is not None:
            return known
        if place is not None:
            # Whoever knew of it has gone since it was looked for.
            self._let_go(place)
        place = _Place(allocator, block)
        allocator.keep(block, self._on_move)
        out_of_window = OutOfWindowBlock(place)
        self._known[place] = weakref.ref(out_of_window)
        self._places[allocator, block] = place
        weakref.finalize(out_of_window, self._dropped.append, place).atexit = False
        return out_of_window

    def touch(self, out_of_window: OutOfWindowBlock) -> None:
        """Note that it was of use: others go before it."""
        place = out_of_window._place
        self._known[place] = self._known.pop(place)

    def give_up(self, is_enough: Callable[[], bool]) -> int:
        """Let go of blocks, the longest retired first, until it is enough; returns how many. What
        prefixes end with stays with them.

        Those that a table still holds go last: that makes a difference only to a ring that would
        have to copy them.
        """
        self.drain()
        given_up = 0
        for place in sorted(self._known, key=_is_in_use):
            out_of_window = self._known[place]()
            if is_enough():
                break
            if out_of_window is not None and not out_of_window.ends and not out_of_window.pins:
                self._let_go(place)
                given_up += 1
        return given_up

    def evictable(self, allocator: BlockAllocator) -> list[int]:
        """Blocks of a group that nobody else holds and that are not pinned."""
        self.drain()
        return [
            place.block
            for place, known in self._known.items()
            if place.allocator is allocator
            and place.block is not None
            and not _is_in_use(place)
            and not _is_pinned(known())
        ]

    def drain(self) -> None:
        """Let go of what nobody knows of any more."""
        # Finalisers append in the middle of anything; both operations are atomic.
        while self._dropped:
            self._let_go(self._dropped.popleft())

    def _let_go(self, place: _Place) -> None:
        if place.block is not None:
            del self._known[place], self._places[place.allocator, place.block]
            place.allocator.let_go(place.block)
            place.block = None

    def _on_move(self, allocator: BlockAllocator, source: int, target: int) -> None:
        """Note that a page was moved to another block."""
        place = self._places.pop((allocator, source))
        place.block = target
        self._places[allocator, target] = place


def _is_in_use(place: _Place) -> bool:
    return place.block is not None and place.allocator.ref_count(place.block) > 1


def _is_pinned(out_of_window: OutOfWindowBlock | None) -> bool:
    return out_of_window is not None and out_of_window.pins > 0
