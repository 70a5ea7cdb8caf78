"""What goes when there is no room: policy, and no bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a store may take.

    Attributes:
        max_bytes: of the disk, for everything in the folder, at any time.
        min_free_bytes: what the disk must still have free.
    """

    max_bytes: int
    min_free_bytes: int

    def excess(self, used: int, free: int, more: int) -> int:
        """By how many bytes a limit would be passed with `more` bytes; negative if by none."""
        return max(used + more - self.max_bytes, self.min_free_bytes + more - free)


def victims(
    entries: Iterable[tuple[str, int]], needed: int, keep: Collection[str]
) -> list[str] | None:
    """The keys of the first entries whose bytes are `needed` together, or None if all do not
    suffice. `entries` come in the order of eviction; those of `keep` are left out."""
    chosen = []
    for key, nbytes in entries:
        if needed <= 0:
            break
        if key not in keep:
            chosen.append(key)
            needed -= nbytes
    return chosen if needed <= 0 else None
