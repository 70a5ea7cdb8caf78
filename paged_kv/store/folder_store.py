"""Entries in a folder of page files under a byte cap, shared by processes.

A writer locks the folder; the system releases the lock of a process that dies. The lock's holder
removes temporary files, which dead writers left, and takes the files that it finds as the truth.
Everything in the folder counts against the cap, also files of others. Eviction happens before a
file is written, so the cap holds at every instant.

A file's time of modification says when it was used last, and so the order of eviction survives
restarts and copies. No use gets an earlier time than the latest that is known: a clock may jump.

Every system call goes through the folder's descriptor, takes names instead of paths, and follows no
link. A file is written under a temporary name, flushed and renamed, so under its own name it is
complete or absent, and readers take no lock. A failed call raises OSError and leaves at most a
temporary file.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from paged_kv.allocator.errors import PagedKVError
from paged_kv.checks import format_size
from paged_kv.store.blob_store import Blob, BlobStore, Finding, Outcome, Written, evicted
from paged_kv.store.entry_file import SUFFIX, Buffer
from paged_kv.store.keys import SAVED_BYTES
from paged_kv.store.options import MIN_BYTES

MIN_FREE_BYTES = 1 << 30
TAG, LOCK = "CACHEDIR.TAG", "lock"
LEDGER, LOOKUPS = "written.json", "lookups"
_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder holds pages of paged_kv: computed again when they are lost, and not worth a backup.
# See https://bford.info/cachedir/
"""
# What earlier versions kept beside the pages.
_OBSOLETE = ("index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm", "sights")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.tmp")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PAGE_FILE = re.compile(rf"([0-9a-f]{{64}}){re.escape(SUFFIX)}")
_BLOCK = 4096
# Bytes that the folder itself and its two small files may grow by while one file is written; a
# small file and its replacement are there at once.
_MARGIN = (64 << 10) + 2 * SAVED_BYTES + (16 << 10)
# Between the uses of two entries that are noted together, so that file systems tell them apart.
_STEP_NS = 1000


class StoreError(PagedKVError):
    """A folder cannot be used as a page store; the message names it and says what to change."""


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
        path: the folder; it is created if missing, and must else be empty or a store.
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
        self._fd = _opened(self.path)
        self._thread_lock = threading.RLock()
        self._lock = FileLock(self.path / LOCK, timeout=lock_s, mode=0o600)
        try:
            self._require_ours()
            with self._alone():
                self._claim()
                self._contents()
                self.written = self._read_written()
        except StoreError:
            self.close()
            raise
        except (OSError, MemoryError) as error:
            self.close()
            raise _unusable(self.path, error) from None

    def __enter__(self) -> FolderStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        with self._thread_lock:
            os.close(self._fd)

    def sizes(self, names: Sequence[str]) -> list[int]:
        found = []
        for name in names:
            try:
                about = os.stat(name + SUFFIX, dir_fd=self._fd, follow_symlinks=False)
            except FileNotFoundError:
                found.append(0)
            else:  # something else may have its name
                found.append(about.st_size if stat.S_ISREG(about.st_mode) else 0)
        return found

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[Buffer]:
        found: list[Buffer] = []
        for name, nbytes in wanted:
            try:
                found.append(self._read(name + SUFFIX, nbytes))
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
                    self._write(LEDGER, [json.dumps(asdict(self.written)).encode()])
                os.fsync(self._fd)  # writes and removals survive a loss of power
        return outcomes

    def entries(self) -> Iterator[Blob]:
        yield from _page_files(self._scan())

    def remove(self, names: Sequence[str]) -> None:
        """See `BlobStore`.

        Raises:
            OSError: some cannot be removed.
        """
        kept = [name for name in names if not self._unlink(name + SUFFIX)]
        if kept:
            raise OSError(f"files that cannot be removed: {len(kept)}")

    def refusal(self, nbytes: int) -> Outcome | None:
        if self._daily_bytes is None or self.written.bytes_today + nbytes <= self._daily_bytes:
            return None
        return Outcome.BUDGET_SPENT

    def touch(self, names: Sequence[str]) -> None:
        for name, used_ns in zip(names, self._next_uses(len(names)), strict=True):
            with suppress(FileNotFoundError):
                times = (used_ns, used_ns)
                os.utime(name + SUFFIX, ns=times, dir_fd=self._fd, follow_symlinks=False)

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
            return self._read(LOOKUPS, SAVED_BYTES)
        except FileNotFoundError:
            return b""

    def save_lookups(self, lookups: bytes) -> None:
        with self._alone():
            self._write(LOOKUPS, [(self.saved_lookups() + lookups)[-SAVED_BYTES:]])

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
            there, here = os.stat(self.path, follow_symlinks=False), os.fstat(self._fd)
            if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
                raise FileNotFoundError(f"{self.path} was replaced by another folder")
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
        more, free = nbytes + _MARGIN, self.free_bytes()
        over_cap = contents.used + more - self.max_bytes
        excess = max(over_cap, self._min_free_bytes + more - free)
        gone = evicted(contents.files.values(), excess, keep)
        if sum(blob.nbytes for blob in gone) < excess:
            self.lack = self._lack(contents.used, free, more)
            return Outcome.NO_ROOM
        self.remove([blob.name for blob in gone])
        for blob in gone:
            contents.used -= contents.files.pop(blob.name).nbytes
        self._write(name + SUFFIX, data, used_ns)
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
            content = json.loads(self._read(LEDGER, 1000))
            return Written(int(content["day"]), int(content["today"]), int(content["in_all"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return Written()

    def _contents(self) -> Contents:
        """The folder's content, after removing files of dead writers."""
        found = []
        for file in self._scan():
            if _TEMPORARY.fullmatch(file.name):
                self._unlink(file.name)
                left = Finding(file.name, "left by a writer that died", file.nbytes, True)
                self._left_behind.append(left)
            else:
                found.append(file)
        files = {blob.name: blob for blob in _page_files(found)}
        own = {name + SUFFIX for name in files} | {LOCK, TAG, LEDGER, LOOKUPS}
        others = [file for file in found if file.name not in own]
        self._latest_ns = max(self._latest_ns, *[blob.used_ns for blob in files.values()], 0)
        return Contents(sum(file.nbytes for file in found), files, others)

    def _scan(self) -> list[Blob]:
        """Everything in the folder, with the bytes that it takes on disk; a folder's include its
        content. The least recently modified comes first."""
        return sorted(_scanned(self._fd), key=lambda file: (file.used_ns, file.name))

    def free_bytes(self) -> int:
        """Free bytes on the disk."""
        figures = os.fstatvfs(self._fd)
        return figures.f_bavail * figures.f_frsize

    def _read(self, name: str, most: int) -> bytes:
        """The first `most` bytes of a file."""
        # Without O_NONBLOCK, opening a fifo of that name would block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=self._fd)
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise FileNotFoundError(f"{name} is no regular file")
            parts, left = [], min(most, about.st_size)
            while left and (part := os.read(fd, left)):
                parts.append(part)
                left -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(fd)

    def _write(self, name: str, data: Sequence[Buffer], used_ns: int | None = None) -> None:
        """Write a whole file, with a time of modification in nanoseconds since 1970 or the present
        one. It survives a loss of power once the folder is flushed too."""
        temporary = _temporary_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
        try:
            try:
                for part in data:
                    left = memoryview(part)
                    while left:
                        left = left[os.write(fd, left) :]
                if used_ns is not None:
                    os.utime(fd, ns=(used_ns, used_ns))
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self._unlink(temporary)
            raise

    def _unlink(self, name: str) -> bool:
        """Remove a file; false if that failed. A missing file counts as removed."""
        try:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd)
        except OSError:
            return False
        return True

    def _claim(self) -> None:
        """Mark the locked folder as a store, and check that it can be written."""
        if os.fstat(self._fd).st_mode & 0o077:
            os.fchmod(self._fd, 0o700)
        if TAG not in os.listdir(self._fd):
            self._write(TAG, [_TAG_TEXT])
        for name in _OBSOLETE:
            self._unlink(name)
        self._write(probe := _temporary_name(), [])
        self._unlink(probe)

    def _require_ours(self) -> None:
        owner = os.fstat(self._fd).st_uid
        if owner != os.geteuid():
            raise StoreError(
                f"{self.path} belongs to user {owner}, and this process runs as user "
                f"{os.geteuid()}: choose a folder of your own"
            )
        # Another process may be turning the same folder into a store at this moment.
        names = {name for name in os.listdir(self._fd) if not _TEMPORARY.fullmatch(name)}
        if names - {LOCK} and TAG not in names:
            raise StoreError(
                f"{self.path} is not empty and not a page store (it has no {TAG}): choose an empty "
                "folder, or one that does not exist"
            )


def _page_files(found: Sequence[Blob]) -> Iterator[Blob]:
    """The entries among files, by their own names."""
    for file in found:
        if match := _PAGE_FILE.fullmatch(file.name):
            yield replace(file, name=match[1])


def _unusable(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"{path} cannot be used as a page store ({error}): choose another folder, or free disk "
        "space and allow writing there"
    )


def _temporary_name() -> str:
    return secrets.token_hex(16) + ".tmp"


def _opened(path: Path) -> int:
    if ".." in path.parts:
        raise StoreError(f"{path} has '..' in it: write the folder's own path")
    if path.is_symlink():
        raise StoreError(f"{path} is a link: name the folder it points to, {path.resolve()}")
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
        return os.open(path, _FOLDER_FLAGS)
    except (FileExistsError, NotADirectoryError):
        raise StoreError(f"{path} is a file: name a folder for the pages") from None
    except OSError as error:
        raise _unusable(path, error) from None


def _scanned(fd: int) -> Iterator[Blob]:
    with os.scandir(fd) as entries:
        for entry in entries:
            try:
                about = os.lstat(entry.name, dir_fd=fd)
                nbytes = max(about.st_size, about.st_blocks * 512)
                if stat.S_ISDIR(about.st_mode):
                    inner = os.open(entry.name, _FOLDER_FLAGS, dir_fd=fd)
                    try:
                        nbytes += sum(file.nbytes for file in _scanned(inner))
                    finally:
                        os.close(inner)
            except FileNotFoundError:
                continue
            yield Blob(entry.name, nbytes, about.st_mtime_ns)
