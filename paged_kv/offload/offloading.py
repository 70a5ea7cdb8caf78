"""Decides which pages of a pool are out of memory, keeps their contents in a file of this process,
and has frames for those that come back.

The file has no name, so that nothing is left of it when the process ends, however it ends. Contents
that are written are never changed; a checksum tells whether they come back as they were.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple
from zlib import crc32

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.allocator.block_allocator import BlockAllocator, BlockTable
from paged_kv.allocator.errors import PagedKVError
from paged_kv.allocator.requantisation import FullBlock, Requantisation
from paged_kv.checks import format_size
from paged_kv.kernels.pages.number_format import FLOATS, Encoding, NumberFormat
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, PageFormat

Words = npt.NDArray[np.uint16]
# Reads that a disk is given at a time.
READERS = 4
# Latest pages of a sequence that stay in memory, the one that is written included.
RECENT_PAGES = 4
# For each sequence, frames hold so many times the tokens that a step may read. Real models lose
# nothing more with twice as many in memory as are read, and some percent with as many.
FRAMES_FOR_READ = 2


class OffloadError(PagedKVError, OSError):
    """Pages could not be written to, or read from, the folder of offloaded pages."""


class Place(NamedTuple):
    """Where a page's contents are in a `PageFile`; no two pages ever have equal places."""

    serial: int  # the number of the write
    offset: int  # the first byte
    nbytes: int
    checksum: int  # CRC-32


class PageFile:
    """Contents of pages on disk, in a folder. One thread at a time writes and releases; any may
    read.

    Attributes:
        nbytes: bytes of the contents that are kept.

    Raises:
        OffloadError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nbytes = 0
        self._free: dict[int, list[int]] = defaultdict(list)
        self._end = 0
        self._serial = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # It lives as long as this object.
            self._file = TemporaryFile(prefix="paged-kv-", dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise OffloadError(
                f"pages cannot be offloaded to {folder}: {error.strerror or error}; name a folder "
                "that this process may write"
            ) from error
        self._readers = ThreadPoolExecutor(READERS, "paged-kv-fetch")

    def write(self, content: Words) -> Place:
        """Keep a page's words.

        Raises:
            OffloadError: they cannot be written; nothing was changed.
        """
        view = memoryview(content.tobytes())
        free = self._free[view.nbytes]
        offset = free[-1] if free else self._end
        try:
            written = 0
            while written < view.nbytes:
                written += os.pwrite(self._file.fileno(), view[written:], offset + written)
        except OSError as error:
            raise OffloadError(
                f"a page of {format_size(view.nbytes)} cannot be written to {self.folder}: "
                f"{error.strerror or error}; no page was dropped. Free space there, or offload to "
                "another folder"
            ) from error
        if free:
            free.pop()
        else:
            self._end += view.nbytes
        self.nbytes += view.nbytes
        self._serial += 1
        return Place(self._serial, offset, view.nbytes, crc32(view))

    def read(self, place: Place) -> Words:
        """The words of a page, uint16 [words].

        Raises:
            OffloadError: they cannot be read, or are not what was written.
        """
        content = bytearray(place.nbytes)
        view, got = memoryview(content), 0
        try:
            while got < place.nbytes:
                count = os.preadv(self._file.fileno(), [view[got:]], place.offset + got)
                if not count:
                    break
                got += count
        except OSError as error:
            raise self._unreadable(place, error.strerror or str(error)) from error
        if got < place.nbytes or crc32(view) != place.checksum:
            raise self._unreadable(place, "it is not what was written")
        return np.frombuffer(content, np.uint16)

    def fetch(self, place: Place) -> Future[Words]:
        """`read` on another thread."""
        return self._readers.submit(self.read, place)

    def release(self, place: Place) -> None:
        """Forget a page, whose place may be used again."""
        self._free[place.nbytes].append(place.offset)
        self.nbytes -= place.nbytes

    def _unreadable(self, place: Place, reason: str) -> OffloadError:
        return OffloadError(
            f"a page of {format_size(place.nbytes)} cannot be read from {self.folder}: {reason}; "
            "sequences that hold it must be computed again"
        )


class _Nowhere:
    """The number format of numbers that are not in memory."""

    name = "offloaded"
    is_centred = False

    @property
    def first(self) -> NumberFormat:
        return self

    def encoding(self, dtype: mx.Dtype) -> Encoding:
        return FLOATS[dtype]

    def slot_words(self, dim: int, dtype: mx.Dtype) -> tuple[int, ...]:
        return ()

    def encode(self, numbers: mx.array) -> tuple[mx.array, ...]:
        return ()

    def decode(self, encoded: Iterable[mx.array], dtype: mx.Dtype) -> mx.array:
        raise NotImplementedError("the numbers of an offloaded page are in a PageFile")


OFFLOADED = PageFormat(_Nowhere(), _Nowhere())


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


@dataclass(eq=False, repr=False)
class Offloading:
    """Pages of a pool that are out of memory, in a folder.

    Raises:
        OffloadError: the folder cannot be written.
    """

    folder: InitVar[Path]
    page_format: PageFormat
    read_tokens: int  # what a step may read of a sequence
    waits: bool  # whether steps wait for pages that they want
    file: PageFile = field(init=False)
    # The blocks of fetched pages; each layer has its own pages there.
    frames: list[BlockTable] = field(default_factory=list, init=False)
    # Pages of a layer that were read from the file, and those that a step wanted and left out
    # because they had not come.
    pages_fetched: int = field(default=0, init=False)
    pages_late: int = field(default=0, init=False)
    # For how many frames there was room or not: finding that out again would evict all cached
    # prefixes again.
    most_tried: int = field(default=0, init=False)
    _wanted: int = field(default=0, init=False)
    _counted: tuple[int, int] = field(default=(0, 0), init=False)

    def __post_init__(self, folder: Path) -> None:
        self.file = PageFile(folder)

    def stats(self) -> dict[str, Any]:
        """Counts and bytes, by their names in `PoolStats`."""
        return {
            "pages_fetched": self.pages_fetched,
            "pages_late": self.pages_late,
            "bytes_offloaded": self.file.nbytes,
        }

    @property
    def frames_of_sequence(self) -> int:
        return FRAMES_FOR_READ * self.read_tokens // PAGE_SIZE

    @property
    def kept_pages(self) -> int:
        """Pages of a sequence that memory holds at least, its frames included."""
        return 1 + RECENT_PAGES + self.frames_of_sequence

    def wanted_frames(self, allocator: BlockAllocator) -> int:
        """How many frames all sequences want. O(1) as long as no page leaves memory, and no
        sequence comes or goes."""
        offloaded = allocator.format_named(OFFLOADED.name)
        counted = len(allocator.tables) - len(self.frames), offloaded.num_used
        if counted != self._counted:
            self._counted = counted
            self._wanted = sum(
                min(
                    self.frames_of_sequence,
                    sum(allocator.format_of(block) is offloaded for block in table.blocks),
                )
                for table in allocator.tables
                if table.tokens > self.read_tokens
            )
        return self._wanted

    def add_frames(self, allocator: BlockAllocator, count: int) -> None:
        """Add frames, for which there is room."""
        name = self.page_format.name
        self.frames += [allocator.new_scratch(name) for _ in range(count)]

    def drop_frames(self, allocator: BlockAllocator, count: int) -> None:
        """Give back the last frames. Layers must forget what is in them."""
        kept = len(self.frames) - count
        for frame in self.frames[kept:]:
            allocator.drop(frame)
        del self.frames[kept:]
        self.most_tried = kept
