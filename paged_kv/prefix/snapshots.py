"""Caches states of recurrent layers, as they were after some tokens of a prompt.

They are not paged: each is a copy of its own, and as large as many pages. So they have a budget of
their own, beside that of the pages.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from paged_kv.allocator.prefixes.eviction import (
    LEAST_WORTH,
    EvictionOrder,
    EvictionPolicy,
)


@dataclass(eq=False)
class Snapshot:
    """The states of the layers that are not paged.

    Attributes:
        states: the states; None once they were evicted.
        nbytes: bytes of their arrays.
        pins: pinned prefixes that hold it.
    """

    states: Any
    nbytes: int
    pins: int = 0


class Snapshots:
    """All snapshots of a prefix cache.

    Args:
        max_bytes: the most that they may take.
        policy: which of them to evict first.
    """

    def __init__(self, max_bytes: int, policy: EvictionPolicy = LEAST_WORTH) -> None:
        self.max_bytes = max_bytes
        self._order: EvictionOrder[weakref.ref[Snapshot]] = EvictionOrder(policy)

    @property
    def nbytes(self) -> int:
        """Bytes of all. O(snapshots)."""
        return sum(snapshot.nbytes for snapshot in self._live())

    def take(self, states: Any, nbytes: int) -> Snapshot | None:
        """A snapshot that stays as long as somebody holds it; others are evicted for it. None if
        there is no room."""
        pinned = sum(each.nbytes for each in self._live() if each.pins)
        if pinned + nbytes > self.max_bytes:
            return None
        snapshot = Snapshot(states, nbytes)
        self.shrink(self.max_bytes - nbytes)
        self._order.touch(weakref.ref(snapshot))
        return snapshot

    def touch(self, snapshot: Snapshot) -> None:
        """Note that a sequence resumed from it."""
        self._order.touch(weakref.ref(snapshot))

    def shrink(self, max_bytes: int) -> None:
        """Evict snapshots that are not pinned until all take at most so many bytes."""
        excess = self.nbytes - max_bytes
        for snapshot in self._live():
            if excess > 0 and not snapshot.pins:
                self._order.discard(weakref.ref(snapshot))
                snapshot.states = None
                excess -= snapshot.nbytes

    def _live(self) -> list[Snapshot]:
        """Those that somebody still holds, in the order of eviction."""
        known = {reference: reference() for reference in self._order}
        for reference, snapshot in known.items():
            if snapshot is None:
                self._order.discard(reference)
        return [snapshot for snapshot in known.values() if snapshot is not None]
