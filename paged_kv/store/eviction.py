"""Decides how much of a store to evict."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a store.

    Attributes:
        max_bytes: the most bytes on disk for everything in the folder, at any time.
        min_free_bytes: bytes that must stay free on the disk.
    """

    max_bytes: int
    min_free_bytes: int

    def excess(self, used: int, free: int, more: int) -> int:
        """The bytes by which `more` bytes would exceed a limit; negative if they fit."""
        return max(used + more - self.max_bytes, self.min_free_bytes + more - free)


def victims(
    entries: Iterable[tuple[str, int]], needed: int, keep: Collection[str]
) -> list[str] | None:
    """The keys of the first entries that free `needed` bytes, or None if all of them free less.
    `entries` are in the order of eviction; those in `keep` are skipped."""
    chosen = []
    for key, nbytes in entries:
        if needed <= 0:
            break
        if key not in keep:
            chosen.append(key)
            needed -= nbytes
    return chosen if needed <= 0 else None
