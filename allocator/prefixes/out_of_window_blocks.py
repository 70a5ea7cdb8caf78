"""Caches full blocks that a sliding window has passed.

Their sequence never reads them again, but another sequence with the same prefix could resume with
them. So they stay cached while there is room, and are evicted before anything else:

    in a ring --cache--> cached --a table retains it--> cached and in use
    cached --evict, or the last object that refers to it is collected--> free
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.prefixes.eviction import (
    LEAST_WORTH,
    EvictionOrder,
    EvictionPolicy,
)


@dataclass(eq=False)
class _Place:
    """The place of a cached block; its block is None once it was evicted."""

    allocator: BlockAllocator
    block: int | None


class OutOfWindowBlock:
    """A reference to a cached block, held by those who know its tokens. The block is released when
    the last reference is collected.

    Attributes:
        ends: cached prefixes that end with it. They need it, so it stays as long as they do.
        pins: pinned prefixes that hold it.
    """

    def __init__(self, place: _Place) -> None:
        self.ends = 0
        self.pins = 0
        self._place = place

    @property
    def block(self) -> int | None:
        """The block, or None if it was evicted."""
        return self._place.block


class OutOfWindowBlocks:
    """All cached out-of-window blocks of a pool. Callers hold the lock of the blocks' allocators.

    Args:
        policy: which of them to evict first.
    """

    def __init__(self, policy: EvictionPolicy = LEAST_WORTH) -> None:
        self._order: EvictionOrder[_Place] = EvictionOrder(policy)
        self._known: dict[_Place, weakref.ref[OutOfWindowBlock]] = {}
        self._places: dict[tuple[BlockAllocator, int], _Place] = {}
        self._dropped: deque[_Place] = deque()

    def cache(self, allocator: BlockAllocator, block: int) -> OutOfWindowBlock:
        """Cache a block that is in use. A block that is cached already keeps its reference."""
        self.drain()
        place = self._places.get((allocator, block))
        known = None if place is None else self._known[place]()
        if known is not None:
            return known
        if place is not None:
            # Its last reference was collected just now.
            self._evict(place)
        place = _Place(allocator, block)
        allocator.keep(block, partial(self._on_move, allocator))
        out_of_window = OutOfWindowBlock(place)
        self._known[place] = weakref.ref(out_of_window)
        self._order.touch(place)
        self._places[allocator, block] = place
        weakref.finalize(out_of_window, self._dropped.append, place).atexit = False
        return out_of_window

    def touch(self, out_of_window: OutOfWindowBlock) -> None:
        """Record that a sequence resumed with it."""
        self._order.touch(out_of_window._place)

    def evict(self, is_enough: Callable[[], bool]) -> int:
        """Evict blocks in the order of the policy until it is enough; returns how many. Those that
        a prefix ends with stay with it.

        Blocks in use by a table go last: evicting one only saves a ring from copying it.
        """
        self.drain()
        evicted = 0
        for place in sorted(self._order, key=_is_in_use):
            out_of_window = self._known[place]()
            if is_enough():
                break
            if out_of_window is not None and not out_of_window.ends and not out_of_window.pins:
                self._evict(place)
                evicted += 1
        return evicted

    def evictable(self, allocator: BlockAllocator) -> list[int]:
        """Blocks of a group that are neither in use nor pinned."""
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
        """Release blocks whose last reference was collected."""
        # Finalisers append in the middle of anything; both operations are atomic.
        while self._dropped:
            self._evict(self._dropped.popleft())

    def _evict(self, place: _Place) -> None:
        if place.block is not None:
            self._order.discard(place)
            del self._known[place], self._places[place.allocator, place.block]
            place.allocator.evict(place.block)
            place.block = None

    def _on_move(self, allocator: BlockAllocator, source: int, target: int) -> None:
        """Record that a page was moved to another block."""
        place = self._places.pop((allocator, source))
        place.block = target
        self._places[allocator, target] = place


def _is_in_use(place: _Place) -> bool:
    return place.block is not None and place.allocator.ref_count(place.block) > 1


def _is_pinned(out_of_window: OutOfWindowBlock | None) -> bool:
    return out_of_window is not None and out_of_window.pins > 0
