"""What blocks hold, as numbers: a frozen snapshot, made from counts that are kept.

Every byte of a slab is in exactly one of these, of each page format:

    mapped  = active + retained + spare + stranded
    active  = allocated + tail + ring slack

    allocated     rows of live tokens
    tail          rows behind the last token of a sequence
    ring slack    rows that a window has left, and that are not written over yet
    retained      blocks that nobody holds but who keeps them for prompts that begin alike: the
                  prefix index, or what was known of a ring that has passed them
    spare         free blocks of slabs that hold nothing, and can be given back
    stranded      free blocks of slabs that hold something: external fragmentation
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple


class FormatStats(NamedTuple):
    """The blocks of one page format. Counts are blocks unless a name says bytes or rows.

    Attributes:
        page_format: its name.
        block_bytes: bytes of a block, the pages of all layers of the group together.
        page_size: rows of a block.
        slabs: slabs mapped.
        used: blocks that a sequence holds.
        cached: blocks that nobody holds but who keeps them for later.
        spare: free blocks of slabs that hold nothing.
        stranded: free blocks of slabs that hold something.
        tail_rows: rows of used blocks behind the last token of every sequence that holds them.
        ring_rows: rows of used blocks that every window has left.
        compactable: blocks of the slabs that `compact()` would give back.
    """

    page_format: str
    block_bytes: int
    page_size: int
    slabs: int
    used: int
    cached: int
    spare: int
    stranded: int
    tail_rows: int
    ring_rows: int
    compactable: int

    @property
    def bytes_tail(self) -> int:
        """Bytes of `tail_rows`."""
        return self.tail_rows * self.block_bytes // self.page_size

    @property
    def bytes_out_of_window(self) -> int:
        """Bytes of `ring_rows`."""
        return self.ring_rows * self.block_bytes // self.page_size


class BlockTotals:
    """The sums over the blocks of several formats, and maybe of several groups of layers."""

    formats: tuple[FormatStats, ...]

    @property
    def blocks_used(self) -> int:
        """Blocks that a sequence holds."""
        return sum(each.used for each in self.formats)

    @property
    def blocks_cached(self) -> int:
        """Blocks that are only kept for later, and are evicted for others."""
        return sum(each.cached for each in self.formats)

    @property
    def blocks_free(self) -> int:
        """Blocks of mapped slabs that nobody holds."""
        return sum(each.spare + each.stranded for each in self.formats)

    @property
    def blocks_by_format(self) -> dict[str, int]:
        """Used blocks of each page format."""
        return self._by_format([each.used for each in self.formats])

    @property
    def cached_by_format(self) -> dict[str, int]:
        """Cached blocks of each page format."""
        return self._by_format([each.cached for each in self.formats])

    @property
    def free_by_format(self) -> dict[str, int]:
        """Free blocks of each page format."""
        return self._by_format([each.spare + each.stranded for each in self.formats])

    @property
    def slabs(self) -> int:
        """Slabs mapped, each in every layer of its group."""
        return sum(each.slabs for each in self.formats)

    @property
    def bytes_allocated(self) -> int:
        """Bytes of the rows of live tokens; what several sequences share counts once."""
        return self.bytes_active - self.bytes_tail - self.bytes_out_of_window

    @property
    def bytes_tail(self) -> int:
        """Bytes of the rows behind the last token of a sequence."""
        return sum(each.bytes_tail for each in self.formats)

    @property
    def bytes_out_of_window(self) -> int:
        """Bytes of the rows of rings that the window has left."""
        return sum(each.bytes_out_of_window for each in self.formats)

    @property
    def bytes_active(self) -> int:
        """Bytes of the pages of used blocks."""
        return sum(each.used * each.block_bytes for each in self.formats)

    @property
    def bytes_retained(self) -> int:
        """Bytes of the pages of cached blocks."""
        return sum(each.cached * each.block_bytes for each in self.formats)

    @property
    def bytes_spare(self) -> int:
        """Bytes of slabs that hold nothing."""
        return sum(each.spare * each.block_bytes for each in self.formats)

    @property
    def bytes_stranded(self) -> int:
        """Bytes of free pages in slabs that hold something."""
        return sum(each.stranded * each.block_bytes for each in self.formats)

    @property
    def bytes_compactable(self) -> int:
        """Bytes of the slabs that `compact()` would give back: call it when this is worth it."""
        return sum(each.compactable * each.block_bytes for each in self.formats)

    @property
    def bytes_mapped(self) -> int:
        """Bytes of all slabs."""
        return self.bytes_active + self.bytes_retained + self.bytes_spare + self.bytes_stranded

    @property
    def internal_fragmentation(self) -> float:
        """The share of active bytes that hold no live token: 1 - allocated / active."""
        return 1 - _ratio(self.bytes_allocated, self.bytes_active)

    @property
    def external_fragmentation(self) -> float:
        """The share of mapped bytes that are neither used nor cached."""
        return 1 - _ratio(self.bytes_active + self.bytes_retained, self.bytes_mapped)

    def _by_format(self, counts: list[int]) -> dict[str, int]:
        total: Counter[str] = Counter()
        for each, count in zip(self.formats, counts, strict=True):
            total[each.page_format] += count
        return dict(total)


@dataclass(frozen=True)
class AllocatorStats(BlockTotals):
    """A snapshot of one allocator.

    Attributes:
        formats: the blocks of each page format.
        blocks_shared: blocks that more than one sequence holds.
        table_entries: entries of all block tables.
        tables: block tables, one a sequence.
        tables_dropped: those of them that were dropped, and whose blocks the next call frees.
        cow_copies: blocks copied because a shared one was written.
        allocation_failures: times that there were not enough blocks.
        bytes_metadata: about what the bookkeeping takes in Python's memory.
    """

    formats: tuple[FormatStats, ...]
    blocks_shared: int = 0
    table_entries: int = 0
    tables: int = 0
    tables_dropped: int = 0
    cow_copies: int = 0
    allocation_failures: int = 0
    bytes_metadata: int = 0

    @property
    def sharing_factor(self) -> float:
        """Table entries for each used block; 1.0 if nothing is shared."""
        return _ratio(self.table_entries, self.blocks_used)


def metadata_bytes(ref_counts: dict[int, int], free: int, tables: int, entries: int) -> int:
    """About what the bookkeeping takes: the dictionary of counts and the ids in it, free ids and
    their places in a list, and block tables. The constants are measured with tracemalloc."""
    ids = len(ref_counts) * 32 + free * 40
    return sys.getsizeof(ref_counts) + ids + tables * 1000 + entries * 8


def _ratio(part: int, whole: int) -> float:
    # Nothing mapped wastes nothing.
    return part / whole if whole else 1.0
