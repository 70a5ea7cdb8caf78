"""Decides how much of a store to evict."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paged_kv.sizes import format_size


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

    def lack(self, used: int, free: int, more: int) -> str:
        """Which limit `more` bytes exceed, and what to change, for people to read."""
        needs = f"an entry and what the index may grow by need {format_size(more)}"
        if self.min_free_bytes - free > used - self.max_bytes:
            return (
                f"{needs}, and the disk has {format_size(free)} free, of which "
                f"{format_size(self.min_free_bytes)} stay free: free disk space, or name a folder "
                "on another disk"
            )
        return (
            f"{needs}, the folder takes {format_size(used)} of at most "
            f"{format_size(self.max_bytes)}, and what could be evicted is less: raise "
            "--store-bytes (store_bytes=)"
        )


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
