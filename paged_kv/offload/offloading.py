"""Decides which pages of a pool are out of memory, and has frames for those that come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.format_slabs import FormatSlabs
from paged_kv.allocator.requantisation import FullBlock, Requantisation
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, PageFormat
from paged_kv.offload.offloaded_layer import OFFLOADED, FetchCounts, Outside
from paged_kv.offload.page_file import PageFile

# Latest pages of a sequence that stay in memory, the one that is written included.
RECENT_PAGES = 4
# For each sequence, frames hold so many times the tokens that a step may read. Real models lose
# nothing more with twice as many in memory as are read, and some percent with as many.
FRAMES_FOR_READ = 2


@dataclass(frozen=True)
class OldestOffloaded:
    """A `RequantisationPolicy` that takes the oldest pages out of memory, but never a sequence's
    first one and its latest ones, which every step reads.

    Attributes:
        page_format: of full pages. It takes those, and pages that are to get that format.
    """

    page_format: str
    watermark: float = 0.875
    page_formats: tuple[str, ...] = (OFFLOADED.name,)

    def requantisations(self, blocks: list[FullBlock], pressure: float) -> Iterator[Requantisation]:
        """See `RequantisationPolicy.requantisations`."""
        for block in sorted(blocks, key=lambda block: -block.age):
            is_in_use = block.is_first or block.age < RECENT_PAGES
            if block.page_format in (FP16.name, self.page_format) and not is_in_use:
                yield Requantisation(block.block, OFFLOADED.name)


@dataclass
class Offloading:
    """Pages of a pool that are out of memory.

    Attributes:
        file: their contents.
        page_format: their format.
        read_tokens: what a step may read of a sequence.
        waits: whether steps wait for pages that they want.
        counts: of all layers.
        most_tried: for how many frames there was room or not: finding that out again would evict
            all cached prefixes again.
    """

    file: PageFile
    page_format: PageFormat
    read_tokens: int
    waits: bool
    counts: FetchCounts = field(default_factory=FetchCounts)
    _frames: list[BlockTable] = field(default_factory=list)
    most_tried: int = 0
    _wanted: int = 0
    _counted: tuple[int, int] = (0, 0)

    @classmethod
    def to(
        cls, folder: Path, page_format: PageFormat, read_tokens: int, *, waits: bool
    ) -> Offloading:
        """Offload to a folder.

        Raises:
            OffloadError: it cannot be written.
        """
        return cls(PageFile(folder), page_format, read_tokens, waits)

    @property
    def policy(self) -> OldestOffloaded:
        return OldestOffloaded(self.page_format.name)

    @property
    def outside(self) -> Outside:
        """What layers need."""
        return Outside(self.file, self.page_format, self.waits, self.counts, self._frames)

    def stats(self) -> dict[str, Any]:
        """Counts and bytes, by their names in `PoolStats`."""
        return {**vars(self.counts), "bytes_offloaded": self.file.nbytes}

    @property
    def frames_of_sequence(self) -> int:
        """Frames for a sequence."""
        return FRAMES_FOR_READ * self.read_tokens // PAGE_SIZE

    @property
    def kept_pages(self) -> int:
        """Pages of a sequence that memory holds at least, its frames included."""
        return 1 + RECENT_PAGES + self.frames_of_sequence

    def wanted_frames(self, allocator: BlockAllocator) -> int:
        """How many frames all sequences want. O(1) as long as no page leaves memory, and no
        sequence comes or goes."""
        offloaded = allocator.format_named(OFFLOADED.name)
        counted = len(allocator.tables) - len(self._frames), offloaded.num_used
        if counted != self._counted:
            self._counted = counted
            self._wanted = sum(
                min(self.frames_of_sequence, _blocks_of(offloaded, table))
                for table in allocator.tables
                if table.tokens > self.read_tokens
            )
        return self._wanted

    @property
    def num_frames(self) -> int:
        return len(self._frames)

    def add_frames(self, allocator: BlockAllocator, count: int) -> None:
        """Add frames, for which there is room."""
        name = self.page_format.name
        self._frames += [allocator.new_scratch(name) for _ in range(count)]

    def drop_frames(self, allocator: BlockAllocator, count: int) -> None:
        """Give back the last frames. Layers must forget what is in them."""
        kept = len(self._frames) - count
        for frame in self._frames[kept:]:
            allocator.drop(frame)
        del self._frames[kept:]
        self.most_tried = kept


def _blocks_of(slabs: FormatSlabs, table: BlockTable) -> int:
    return sum(table.allocator.format_of(block) is slabs for block in table.blocks)
