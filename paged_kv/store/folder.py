"""The folder of a store, and every system call on it.

Every call goes through the folder's descriptor, takes names instead of paths, and follows no link.
A file is written under a temporary name, flushed and renamed, so under its own name it is complete
or absent. A failed call raises OSError and leaves at most a temporary file.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from paged_kv.allocator.errors import PagedKVError
from paged_kv.store.blob_store import Blob
from paged_kv.store.entry_file import Buffer

TAG, LOCK = "CACHEDIR.TAG", "lock"
_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder holds pages of paged_kv: computed again when they are lost, and not worth a backup.
# See https://bford.info/cachedir/
"""
# What earlier versions kept beside the pages.
_OBSOLETE = ("index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm", "sights")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.tmp")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class StoreError(PagedKVError):
    """A folder cannot be used as a page store; the message names it and says what to change."""


def unusable(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"{path} cannot be used as a page store ({error}): choose another folder, or free disk "
        "space and allow writing there"
    )


def is_temporary(name: str) -> bool:
    """Whether `name` has the form of a file that is being written, or was when its writer died."""
    return _TEMPORARY.fullmatch(name) is not None


class Folder:
    """A folder that belongs to a store. A missing one is created; any other must be empty or a
    store.

    Raises:
        StoreError: the folder cannot be used; the message says why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _opened(path)
        try:
            self._require_ours()
        except (OSError, StoreError) as error:
            self.close()
            raise error if isinstance(error, StoreError) else unusable(path, error) from None

    def close(self) -> None:
        os.close(self._fd)

    def require_there(self) -> None:
        """Raise an OSError if the folder's path no longer leads to it."""
        there, here = os.stat(self.path, follow_symlinks=False), os.fstat(self._fd)
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            raise FileNotFoundError(f"{self.path} was replaced by another folder")

    def scan(self) -> list[Blob]:
        """Everything in the folder, with the bytes that it takes on disk; a folder's include its
        content. The least recently modified comes first."""
        return sorted(_scanned(self._fd), key=lambda file: (file.used_ns, file.name))

    def size(self, name: str) -> int:
        """The bytes of a file; 0 if there is none, or something else has its name."""
        try:
            about = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        return about.st_size if stat.S_ISREG(about.st_mode) else 0

    def free_bytes(self) -> int:
        """Those of the disk."""
        figures = os.fstatvfs(self._fd)
        return figures.f_bavail * figures.f_frsize

    def read(self, name: str, most: int | None = None) -> bytes:
        """A file's bytes, or the first `most` of them."""
        # Without O_NONBLOCK, opening a fifo of that name would block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=self._fd)
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise FileNotFoundError(f"{name} is no regular file")
            size = about.st_size if most is None else min(most, about.st_size)
            parts, left = [], size
            while left and (part := os.read(fd, left)):
                parts.append(part)
                left -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(fd)

    def write(self, name: str, data: Sequence[Buffer], used_ns: int | None = None) -> None:
        """Write a whole file, with a time of modification in nanoseconds since 1970 or the present
        one. It survives a loss of power only after `sync`."""
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
            self.remove(temporary)
            raise

    def set_time(self, name: str, used_ns: int) -> None:
        """Give a file, if it is there, another time of modification."""
        with suppress(FileNotFoundError):
            os.utime(name, ns=(used_ns, used_ns), dir_fd=self._fd, follow_symlinks=False)

    def sync(self) -> None:
        """Make earlier writes and removals survive a loss of power."""
        os.fsync(self._fd)

    def remove(self, name: str) -> bool:
        """Remove a file; false if that failed. A missing file counts as removed."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def claim(self) -> None:
        """Mark the folder as a store, and check that it can be written. The caller holds the
        store's lock.

        Raises:
            OSError: the folder cannot be written.
        """
        if os.fstat(self._fd).st_mode & 0o077:
            os.fchmod(self._fd, 0o700)
        if TAG not in os.listdir(self._fd):
            self.write(TAG, [_TAG_TEXT])
        for name in _OBSOLETE:
            self.remove(name)
        self.write(probe := _temporary_name(), [])
        self.remove(probe)

    def _require_ours(self) -> None:
        owner = os.fstat(self._fd).st_uid
        if owner != os.geteuid():
            raise StoreError(
                f"{self.path} belongs to user {owner}, and this process runs as user "
                f"{os.geteuid()}: choose a folder of your own"
            )
        # Another process may be turning the same folder into a store at this moment.
        names = {name for name in os.listdir(self._fd) if not is_temporary(name)}
        if names - {LOCK} and TAG not in names:
            raise StoreError(
                f"{self.path} is not empty and not a page store (it has no {TAG}): choose an empty "
                "folder, or one that does not exist"
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
        raise unusable(path, error) from None


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
