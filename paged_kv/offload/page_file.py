"""Keeps the contents of pages that are not in memory, in a file of this process.

The file has no name, so that nothing is left of it when the process ends, however it ends. Contents
that are written are never changed; a checksum tells whether they come back as they were.
"""

from __future__ import annotations

import os
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from paged_kv.allocator.errors import PagedKVError
from paged_kv.sizes import format_size

Words = npt.NDArray[np.uint16]
# Reads that a disk is given at a time.
READERS = 4


class OffloadError(PagedKVError, OSError):
    """Pages could not be written to, or read from, the folder of offloaded pages."""


class Place(NamedTuple):
    """Where a page's contents are in a `PageFile`; no two pages ever have equal places.

    Attributes:
        serial: the number of the write.
        offset: the first byte.
        nbytes: how many there are.
        checksum: CRC-32 of them.
    """

    serial: int
    offset: int
    nbytes: int
    checksum: int


class PageFile:
    """Contents of pages on disk. One thread at a time writes and releases; any may read.

    Args:
        folder: where the file is made.

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
