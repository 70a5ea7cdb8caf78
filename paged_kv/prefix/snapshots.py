"""States of recurrent layers, as they were behind some tokens.

They are not paged: each is a copy of its own, and as large as many pages. So they have a bound of
their own, beside that of the pages, and the least recently used are let go.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Snapshot:
    """What the layers hold that are not paged.

    Attributes:
        states: that; None once it was let go.
        nbytes: bytes of its arrays.
        pins: prefixes with it that were pinned.
    """

    states: Any
    nbytes: int
    pins: int = 0


class Snapshots:
    """The snapshots that prefixes have, at most `max_bytes` of them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        # In the order in which they were last used.
        self._known: dict[int, weakref.ref[Snapshot]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all. O(snapshots)."""
        return sum(snapshot.nbytes for snapshot in self._live())

    def take(self, states: Any, nbytes: int) -> Snapshot | None:
        """A snapshot that stays as long as somebody holds it, in the place of others if need be;
        None if there is no room."""
        pinned = sum(each.nbytes for each in self._live() if each.pins)
        if pinned + nbytes > self.max_bytes:
            return None
        snapshot = Snapshot(states, nbytes)
        self.shrink(self.max_bytes - nbytes)
        self._known[id(snapshot)] = weakref.ref(snapshot)
        return snapshot

    def touch(self, snapshot: Snapshot) -> None:
        """Note that it was of use: others go before it."""
        self._known[id(snapshot)] = self._known.pop(id(snapshot))

    def shrink(self, max_bytes: int) -> None:
        """Let the least recently used go until all have at most so many bytes, but no pinned
        ones."""
        excess = self.nbytes - max_bytes
        for snapshot in self._live():
            if excess > 0 and not snapshot.pins:
                del self._known[id(snapshot)]
                snapshot.states = None
                excess -= snapshot.nbytes

    def _live(self) -> list[Snapshot]:
        """Those that somebody still holds."""
        found = {key: known() for key, known in self._known.items()}
        live = {key: snapshot for key, snapshot in found.items() if snapshot is not None}
        self._known = {key: self._known[key] for key in live}
        return list(live.values())
