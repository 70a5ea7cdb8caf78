"""Defines the memory statistics: frozen snapshots, made from running counts.

Every byte of a slab is in exactly one of these, for each page format:

    mapped  = active + retained + spare + fragmented
    active  = allocated + last block + out of window

    allocated        slots of live tokens
    last block       unwritten slots after a sequence's last token: last-block fragmentation
    out of window    slots whose tokens the window has passed, until they are overwritten
    retained         cached blocks: no sequence holds them, but the prefix index or
                     `OutOfWindowBlocks` keeps them for prompts with the same prefix
    spare            free blocks of empty slabs, which can be unmapped
    fragmented       free blocks of partly used slabs: external fragmentation
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple


class FormatStats(NamedTuple):
    """The blocks of one page format. Counts are blocks unless a name says bytes or slots.

    Attributes:
        page_format: its name.
        block_bytes: bytes of a block: the pages of all layers of the group together.
        page_size: slots of a block.
        slabs: mapped slabs.
        used: blocks that a sequence holds.
        cached: blocks that no sequence holds, kept for later prompts.
        spare: free blocks of empty slabs.
        fragmented: free blocks of partly used slabs.
        last_block_slots: slots of used blocks after the last token of every sequence that
            holds them.
        out_of_window_slots: slots of used blocks that every window has passed.
        compactable: blocks of the slabs that `compact()` would unmap.
    """

    page_format: str
    block_bytes: int
    page_size: int
    slabs: int
    used: int
    cached: int
    spare: int
    fragmented: int
    last_block_slots: int
    out_of_window_slots: int
    compactable: int

    @property
    def bytes_last_block(self) -> int:
        """Bytes of `last_block_slots`."""
        return self.last_block_slots * self.block_bytes // self.page_size

    @property
    def bytes_out_of_window(self) -> int:
        """Bytes of `out_of_window_slots`."""
        return self.out_of_window_slots * self.block_bytes // self.page_size


class BlockTotals:
    """Sums over the blocks of several formats, possibly of several groups of layers."""

    formats: tuple[FormatStats, ...]

    @property
    def blocks_used(self) -> int:
        """Blocks that a sequence holds."""
        return sum(each.used for each in self.formats)

    @property
    def blocks_cached(self) -> int:
        """Blocks that no sequence holds, kept for later prompts; evicted when memory is short."""
        return sum(each.cached for each in self.formats)

    @property
    def blocks_free(self) -> int:
        """Blocks of mapped slabs that are neither used nor cached."""
        return sum(each.spare + each.fragmented for each in self.formats)

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
        return self._by_format([each.spare + each.fragmented for each in self.formats])

    @property
    def slabs(self) -> int:
        """Mapped slabs; a slab spans every layer of its group."""
        return sum(each.slabs for each in self.formats)

    @property
    def bytes_allocated(self) -> int:
        """Bytes of the slots of live tokens; shared blocks count once."""
        return self.bytes_active - self.bytes_last_block - self.bytes_out_of_window

    @property
    def bytes_last_block(self) -> int:
        """Bytes of the unwritten slots after a sequence's last token."""
        return sum(each.bytes_last_block for each in self.formats)

    @property
    def bytes_out_of_window(self) -> int:
        """Bytes of the slots of rings that the window has passed."""
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
        """Bytes of empty slabs."""
        return sum(each.spare * each.block_bytes for each in self.formats)

    @property
    def bytes_fragmented(self) -> int:
        """Bytes of free pages in partly used slabs."""
        return sum(each.fragmented * each.block_bytes for each in self.formats)

    @property
    def bytes_compactable(self) -> int:
        """Bytes of the slabs that `compact()` would unmap."""
        return sum(each.compactable * each.block_bytes for each in self.formats)

    @property
    def bytes_mapped(self) -> int:
        """Bytes of all slabs."""
        return self.bytes_active + self.bytes_retained + self.bytes_spare + self.bytes_fragmented

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
        tables: block tables, one per sequence.
        tables_dropped: dropped tables among them, whose blocks the next call frees.
        cow_copies: blocks copied on a write to a shared block.
        allocation_failures: allocations that failed for lack of blocks.
        bytes_metadata: estimated bytes of the bookkeeping in Python's memory.
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
        """Table entries per used block; 1.0 if nothing is shared."""
        return _ratio(self.table_entries, self.blocks_used)


def metadata_bytes(ref_counts: dict[int, int], free: int, tables: int, entries: int) -> int:
    """Estimated bytes of the bookkeeping: the dictionary of counts with its ids, the list of free
    ids, and the block tables. The constants were measured with tracemalloc."""
    ids = len(ref_counts) * 32 + free * 40
    return sys.getsizeof(ref_counts) + ids + tables * 1000 + entries * 8


def _ratio(part: int, whole: int) -> float:
    # Nothing mapped wastes nothing.
    return part / whole if whole else 1.0
