"""What a pool holds, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class PoolStats:
    """A snapshot of a pool.

    Attributes:
        page_format: how pages hold numbers.
        backend: which kernels write and read them.
        blocks_used: blocks that a sequence holds.
        blocks_cached: blocks that only the prefix index holds, and that are evicted for others.
        blocks_free: blocks of mapped slabs that nobody holds.
        blocks_shared: blocks that more than one sequence holds.
        blocks_by_format: used blocks of each page format.
        evictions: blocks' worth of cached tokens that were let go to make room.
        demotions: blocks that became smaller because memory was short, by their new format.
        table_entries: entries of all block tables; over `blocks_used`, this is the sharing factor.
        slabs: slabs mapped, each in every layer of its group.
        bytes_mapped: bytes of all slabs.
        bytes_active: bytes of the pages of used blocks.
        bytes_budget: the most that may be mapped.
        cow_copies: blocks copied because a shared one was written.
        allocation_failures: times the pool was exhausted.
        gather_fallbacks: times keys and values were gathered for attention that does not
            read pages.
    """

    page_format: str
    backend: str
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    blocks_shared: int
    blocks_by_format: Mapping[str, int]
    evictions: int
    demotions: Mapping[str, int]
    table_entries: int
    slabs: int
    bytes_mapped: int
    bytes_active: int
    bytes_budget: int
    cow_copies: int
    allocation_failures: int
    gather_fallbacks: int

    def __add__(self, other: PoolStats) -> PoolStats:
        """The sum of two pools under one budget."""
        same = {"page_format", "backend", "bytes_budget", "blocks_by_format", "demotions"}
        ours, theirs = self.as_dict(), other.as_dict()
        return replace(
            self,
            blocks_by_format=sum_counts([self.blocks_by_format, other.blocks_by_format]),
            demotions=sum_counts([self.demotions, other.demotions]),
            **{name: ours[name] + theirs[name] for name in ours if name not in same},
        )

    def as_dict(self) -> dict[str, Any]:
        """The same as a plain dictionary, ready for JSON."""
        return asdict(self)


def sum_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of counts of the same things."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
