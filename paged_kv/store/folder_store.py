"""Entries in a folder of page files under a byte cap, shared by processes.

A writer locks the folder; the system releases the lock of a process that dies. The lock's holder
removes temporary files, which dead writers left, and takes the files that it finds as the truth.
Everything in the folder counts against the cap, also files of others. Eviction happens before a
file is written, so the cap holds at every instant.

A file's time of modification says when it was used last, and so the order of eviction survives
restarts and copies. No use gets an earlier time than the latest that is known: a clock may jump.

Readers take no lock: a file is complete or absent.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from paged_kv.checks import format_size
from paged_kv.store.blob_store import Blob, BlobStore, Finding, Outcome, Written, evicted
from paged_kv.store.entry_file import SUFFIX, Buffer
from paged_kv.store.folder import LOCK, TAG, Folder, is_temporary, unusable
from paged_kv.store.keys import SAVED_BYTES
from paged_kv.store.options import MIN_BYTES

MIN_FREE_BYTES = 1 << 30
LEDGER, LOOKUPS = "written.json", "lookups"
_PAGE_FILE = re.compile(rf"([0-9a-f]{{64}}){re.escape(SUFFIX)}")
_BLOCK = 4096
# Bytes that the folder itself and its two small files may grow by while one file is written; a
# small file and its replacement are there at once.
_MARGIN = (64 << 10) + 2 * SAVED_BYTES + (16 << 10)
# Between the uses of two entries that are noted together, so that file systems tell them apart.
_STEP_NS = 1000


@dataclass
class Contents:
    """The content of a locked folder: the bytes that everything takes on disk, the entries, the
    least recently used first, and files that are not the store's."""

    used: int
    files: dict[str, Blob]
    others: list[Blob]


class FolderStore(BlobStore):
    """See `BlobStore`.

    Args:
        path: the folder; it is created if missing.
        max_bytes: the most bytes that everything in it may take, at any time.
        min_free_bytes: bytes that the disk must still have free.
        lock_s: seconds to wait for other processes that write.
        daily_bytes: the most bytes to write to the folder in a day; None for any number.

    Raises:
        ValueError: max_bytes is too small for any entry.
        StoreError: the folder cannot be used; the message says why.
    """

    label = "folder"
    is_shared = False
    patience_s = 5.0
    flush_s = 60.0  # for an uncommonly slow disk
    queue_bytes = 512 << 20
    get_bytes = 4 << 20
    put_bytes = 64 << 20  # which scans the folder once, while other processes wait for its lock

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int,
        *,
        min_free_bytes: int = MIN_FREE_BYTES,
        lock_s: float = 10.0,
        daily_bytes: int | None = None,
    ) -> None:
        if max_bytes < MIN_BYTES:
            raise ValueError(f"store_bytes must be at least {MIN_BYTES:,}, got {max_bytes:,}")
        self.max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._daily_bytes = daily_bytes
        self._left_behind: list[Finding] = []
        self._latest_ns = 0
        self.path = Path(path).expanduser().absolute()
        self.name = str(self.path)
        self.folder = Folder(self.path)
        self._thread_lock = threading.RLock()
        self._lock = FileLock(self.path / LOCK, timeout=lock_s, mode=0o600)
        try:
            with self._alone():
                self.folder.claim()
                self._contents()
                self.written = self._read_written()
        except (OSError, MemoryError) as error:
            self.close()
            raise unusable(self.path, error) from None

    def __enter__(self) -> FolderStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        with self._thread_lock:
            self.folder.close()

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [self.folder.size(name + SUFFIX) for name in names]

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[Buffer]:
        found: list[Buffer] = []
        for name, nbytes in wanted:
            try:
                found.append(self.folder.read(name + SUFFIX, nbytes))
            except FileNotFoundError:
                found.append(b"")
        return found

    def put(
        self, entries: Sequence[tuple[str, Sequence[Buffer]]], keep: Collection[str] = ()
    ) -> list[Outcome]:
        """See `BlobStore`. Entries stored before survive any failure."""
        outcomes = []
        with self.exclusive() as contents:
            before = self.written = self._read_written()
            uses = self._next_uses(len(entries))
            try:
                for (name, data), used_ns in zip(entries, uses, strict=True):
                    outcomes.append(self._put(contents, name, data, used_ns, keep))
            finally:
                if self.written != before:
                    self.folder.write(LEDGER, [json.dumps(asdict(self.written)).encode()])
                self.folder.sync()
        return outcomes

    def entries(self) -> Iterator[Blob]:
        yield from _page_files(self.folder.scan())

    def remove(self, names: Sequence[str]) -> None:
        """See `BlobStore`.

        Raises:
            OSError: some cannot be removed.
        """
        kept = [name for name in names if not self.folder.remove(name + SUFFIX)]
        if kept:
            raise OSError(f"files that cannot be removed: {len(kept)}")

    def refusal(self, nbytes: int) -> Outcome | None:
        if self._daily_bytes is None or self.written.bytes_today + nbytes <= self._daily_bytes:
            return None
        return Outcome.BUDGET_SPENT

    def touch(self, names: Sequence[str]) -> None:
        for name, used_ns in zip(names, self._next_uses(len(names)), strict=True):
            self.folder.set_time(name + SUFFIX, used_ns)

    def shrink(self, max_bytes: int) -> list[Blob]:
        with self.exclusive() as contents:
            gone = evicted(contents.files.values(), contents.used - max_bytes)
            self.remove([blob.name for blob in gone])
            return gone

    def oddities(self) -> list[Finding]:
        """Files that dead writers have left and that were removed, and those of others."""
        with self.exclusive() as contents:
            others = contents.others
        problem = "not a file of the store; it counts against the cap"
        return self._left_behind + [
            Finding(file.name, problem, file.nbytes, False) for file in others
        ]

    def saved_lookups(self) -> bytes:
        try:
            return self.folder.read(LOOKUPS, SAVED_BYTES)
        except FileNotFoundError:
            return b""

    def save_lookups(self, lookups: bytes) -> None:
        with self._alone():
            self.folder.write(LOOKUPS, [(self.saved_lookups() + lookups)[-SAVED_BYTES:]])

    @contextmanager
    def exclusive(self) -> Iterator[Contents]:
        """Lock the folder, and remove what writers have left that died.

        Raises:
            TimeoutError: another process held the lock for too long.
        """
        with self._alone():
            yield self._contents()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._thread_lock:
            self.folder.require_there()
            try:
                self._lock.acquire()
            except Timeout:
                waited = self._lock.timeout
                raise TimeoutError(f"another process writes there for {waited:g} s") from None
            try:
                yield
            finally:
                self._lock.release()

    def _put(
        self,
        contents: Contents,
        name: str,
        data: Sequence[Buffer],
        used_ns: int,
        keep: Collection[str],
    ) -> Outcome:
        nbytes = -(-sum(map(len, data)) // _BLOCK) * _BLOCK
        if self.sizes([name]) != [0]:
            return Outcome.KNOWN
        if refusal := self.refusal(nbytes):
            return refusal
        more, free = nbytes + _MARGIN, self.folder.free_bytes()
        over_cap = contents.used + more - self.max_bytes
        excess = max(over_cap, self._min_free_bytes + more - free)
        gone = evicted(contents.files.values(), excess, keep)
        if sum(blob.nbytes for blob in gone) < excess:
            self.lack = self._lack(contents.used, free, more)
            return Outcome.NO_ROOM
        self.remove([blob.name for blob in gone])
        for blob in gone:
            contents.used -= contents.files.pop(blob.name).nbytes
        self.folder.write(name + SUFFIX, data, used_ns)
        self.written = self.written.plus(nbytes)
        contents.used += nbytes
        return Outcome.STORED

    def _next_uses(self, count: int) -> range:
        """The times of the next `count` uses, in nanoseconds since 1970, the latest first."""
        first = max(time.time_ns(), self._latest_ns + _STEP_NS)
        self._latest_ns = first + max(0, count - 1) * _STEP_NS
        return range(first + (count - 1) * _STEP_NS, first - _STEP_NS, -_STEP_NS)

    def _lack(self, used: int, free: int, more: int) -> str:
        """Which limit `more` bytes exceed, and what to change, for people to read."""
        needs = f"an entry needs {format_size(more)}"
        if self._min_free_bytes - free > used - self.max_bytes:
            return (
                f"{needs}, and the disk has {format_size(free)} free, of which "
                f"{format_size(self._min_free_bytes)} stay free: free disk space, or name a folder "
                "on another disk"
            )
        return (
            f"{needs}, the folder takes {format_size(used)} of at most "
            f"{format_size(self.max_bytes)}, and what could be evicted is less: raise "
            "--store-bytes (store_bytes=)"
        )

    def _read_written(self) -> Written:
        """What all processes have written; zeros if the file is lost or damaged."""
        try:
            content = json.loads(self.folder.read(LEDGER, 1000))
            return Written(int(content["day"]), int(content["today"]), int(content["in_all"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return Written()

    def _contents(self) -> Contents:
        """The folder's content, after removing files of dead writers."""
        found = []
        for file in self.folder.scan():
            if is_temporary(file.name):
                self.folder.remove(file.name)
                left = Finding(file.name, "left by a writer that died", file.nbytes, True)
                self._left_behind.append(left)
            else:
                found.append(file)
        files = {blob.name: blob for blob in _page_files(found)}
        own = {name + SUFFIX for name in files} | {LOCK, TAG, LEDGER, LOOKUPS}
        others = [file for file in found if file.name not in own]
        self._latest_ns = max(self._latest_ns, *[blob.used_ns for blob in files.values()], 0)
        return Contents(sum(file.nbytes for file in found), files, others)


def _page_files(found: Sequence[Blob]) -> Iterator[Blob]:
    """The entries among files, by their own names."""
    for file in found:
        if match := _PAGE_FILE.fullmatch(file.name):
            yield replace(file, name=match[1])
