"""A folder of page files under a byte cap, shared by processes.

Who writes has the folder for itself, by a lock that the system takes away from a process that dies.
What it then finds there is the truth: temporary files are those of writers that died, and go; the
index is brought in line with the files; whatever lies there counts against the cap, whoever put it
there. Room is made before a file is begun, so the cap holds at every instant.

Reading takes no lock: a file is whole, or is not there. It is verified and compared with what was
asked for, every time.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from filelock import FileLock, Timeout

from paged_kv.store import index as index_file
from paged_kv.store.entry_file import (
    MAX_HEAD_BYTES,
    SUFFIX,
    Buffer,
    Entry,
    decode,
    decode_place,
    encode,
    file_name,
)
from paged_kv.store.errors import InvalidEntry, NewerVersion, OtherEntry, unusable
from paged_kv.store.eviction import Limits, least_recently_used
from paged_kv.store.finding import Finding
from paged_kv.store.folder import LOCK, TAG, Folder, is_page_file, is_temporary, size_on_disk
from paged_kv.store.index import OpenIndex, Row
from paged_kv.store.keys import Place

DEFAULT_STORE_BYTES = "50GB"
MIN_BYTES = 8 << 20
MIN_FREE_BYTES = 1 << 30
# What the index and the folder itself may grow by while one file is written.
_MARGIN = index_file.ROOM + (64 << 10)

FAULTS = (OSError, sqlite3.Error, MemoryError, InvalidEntry)
"""What a disk can do to whoever uses it."""

Known = tuple[Row, Sequence[int]]
"""What the index is to know of an entry, and the tokens of its block."""

File = tuple[Known, Sequence[Buffer]]
"""That, and the bytes of the entry's file."""


class Outcome(Enum):
    """What became of an entry that was to be stored."""

    STORED = "stored"
    KNOWN = "known"
    NO_ROOM = "no room"


@dataclass
class Contents:
    """What is in a folder that one has alone.

    Attributes:
        used: bytes that everything takes of the disk.
        files: the keys of entries, and the bytes of their files.
        others: what else is there that is not the store's own, and its bytes.
    """

    used: int
    files: dict[str, int]
    others: dict[str, int]


class PageStore:
    """Entries in a folder.

    All methods may be called from any thread, and raise what `FAULTS` lists.

    Args:
        path: the folder; it is made if it is not there.
        max_bytes: the most that everything in it may take, at any time.
        min_free_bytes: what the disk must still have free.
        patience_s: how long to wait for other processes that write.

    Attributes:
        discarded: what was found in the folder so far, and was no use to anybody.

    Raises:
        ValueError: max_bytes is too small for an index and anything else.
        StoreError: the folder cannot be used; the message says why.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int,
        *,
        min_free_bytes: int = MIN_FREE_BYTES,
        patience_s: float = 10.0,
    ) -> None:
        if max_bytes < MIN_BYTES:
            raise ValueError(
                f"store_bytes must be at least {MIN_BYTES:,}, as the index takes some of it, "
                f"got {max_bytes:,}"
            )
        self.limits = Limits(max_bytes, min_free_bytes)
        self.discarded: list[Finding] = []
        self.path = Path(path).expanduser().absolute()
        self.folder = Folder(self.path)
        self._thread_lock = threading.RLock()
        self._lock = FileLock(self.path / LOCK, timeout=patience_s, mode=0o600)
        # Who looks something up must not wait for who writes files.
        self._index, self._lookups = OpenIndex(self.folder), OpenIndex(self.folder)
        try:
            with self._alone():
                self.folder.claim()
                self._contents()
        except FAULTS as error:
            self.close()
            raise unusable(self.path, error) from None

    def __enter__(self) -> PageStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        with self._thread_lock:
            self._index.close()
            self._lookups.close()
            self.folder.close()

    def get(self, place: Place) -> Entry:
        """What is stored at a place.

        Raises:
            FileNotFoundError: nothing is.
            InvalidEntry: the file is damaged, or holds something else.
        """
        entry = decode(self.folder.read(file_name(place.key)), place.key)
        if entry.place != place:
            raise OtherEntry("the file holds other tokens, or what another model computed")
        return entry

    def children(self, parent: str) -> list[tuple[int, str]]:
        """How many tokens the entries behind a block have, and their keys."""
        with self._lookups.use() as index:
            return index.children(parent)

    def closest(self, parent: str, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """The tokens of blocks behind a block, those that have most first tokens in common with
        `tokens`, and a few more."""
        with self._lookups.use() as index:
            return index.closest(parent, tokens)

    def stored_keys(self) -> set[str]:
        """All entries."""
        with self._lookups.use() as index:
            return index.keys()

    def rows(self) -> list[Row]:
        """All entries, the latest used first."""
        with self._lookups.use() as index:
            return index.rows()

    def put(self, entries: Iterable[Entry], keep: Collection[str] = ()) -> list[Outcome]:
        """Store entries, and say what became of each. What must go for them is what was used least
        recently, and none of `keep`. Whatever fails, what was stored before is there."""
        return self.put_files((file_of(each.place, encode(each)) for each in entries), keep)

    def put_files(self, files: Iterable[File], keep: Collection[str] = ()) -> list[Outcome]:
        """`put`, of entries that are the bytes of their files already."""
        outcomes, added = [], []
        with self.exclusive() as contents:
            try:
                for known, data in files:
                    outcomes.append(self._put(contents, known[0], data, keep))
                    if outcomes[-1] is Outcome.STORED:
                        added.append(known)
            finally:
                with self._index.use() as index:
                    index.add(added)
                self.folder.sync()
        return outcomes

    def touch(self, keys: Sequence[str]) -> None:
        """Note entries as used just now, the first of them latest."""
        with self._index.use() as index:
            index.touch(keys)

    def discard(self, keys: Sequence[str]) -> int:
        """Take entries away, as far as they are there; returns how many were."""
        with self.exclusive() as contents:
            there = [key for key in keys if key in contents.files]
            self._discard(there)
            return len(there)

    @contextmanager
    def exclusive(self) -> Iterator[Contents]:
        """Have the folder alone, with the index in line with its files.

        Raises:
            TimeoutError: another process did not let go of the folder.
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
        self, contents: Contents, row: Row, data: Sequence[Buffer], keep: Collection[str]
    ) -> Outcome:
        if row.key in contents.files:
            return Outcome.KNOWN
        more = row.nbytes + _MARGIN
        excess = self.limits.excess(contents.used, self.folder.free_bytes(), more)
        if excess > 0:
            with self._index.use() as index:
                by_use = [(key, contents.files.get(key, 0)) for key in index.by_use()]
            victims = least_recently_used(by_use, excess, keep)
            if victims is None:
                return Outcome.NO_ROOM
            self._discard(victims)
            contents.used -= sum(contents.files.pop(key, 0) for key in victims)
        self.folder.write(file_name(row.key), data)
        contents.files[row.key] = row.nbytes
        # The index gets its rows when all files are written.
        contents.used += row.nbytes + index_file.ROW_BYTES
        return Outcome.STORED

    def _discard(self, keys: Sequence[str]) -> None:
        removed = [key for key in keys if self.folder.remove(file_name(key))]
        with self._index.use() as index:
            index.remove(removed)
        if len(removed) < len(keys):
            raise OSError(f"{len(keys) - len(removed)} files cannot be removed")

    def _contents(self) -> Contents:
        """What is there, without what writers left that died, and with an index that knows it."""
        sizes = self.folder.scan()
        for name in [name for name in sizes if is_temporary(name)]:
            self._give_up(name, "left by a writer that died", sizes.pop(name))
        files = {
            name.removesuffix(SUFFIX): size for name, size in sizes.items() if is_page_file(name)
        }
        if self._index.is_damaged or self._lookups.is_damaged or not self._align(files):
            self._remove_index()
            self._align(files)
        own = {file_name(key) for key in files} | set(index_file.FILES) | {LOCK, TAG}
        others = {name: size for name, size in sizes.items() if name not in own}
        # Once more: the index may have grown.
        return Contents(sum(self.folder.scan().values()), files, others)

    def _align(self, files: dict[str, int]) -> bool:
        """Let the index know these files and no others; false if it is damaged."""
        try:
            with self._index.use() as index:
                known = index.keys()
                index.remove(list(known - files.keys()))
                found = [self._found(key, files[key]) for key in files.keys() - known]
                index.add([known for known in found if known is not None])
        except sqlite3.DatabaseError:
            if not self._index.is_damaged:
                raise
            return False
        return True

    def _found(self, key: str, nbytes: int) -> Known | None:
        """What a file says that the index does not know. One that is no entry goes; what another
        version wrote stays, and counts."""
        try:
            data = self.folder.read(file_name(key), MAX_HEAD_BYTES)
            return _known(key, nbytes, *decode_place(data))
        except NewerVersion:
            return None
        except (InvalidEntry, KeyError) as error:
            self._give_up(file_name(key), f"damaged: {error}", nbytes)
            return None

    def _give_up(self, name: str, problem: str, nbytes: int) -> None:
        self.folder.remove(name)
        self.discarded.append(Finding(name, problem, nbytes, True))

    def _remove_index(self) -> None:
        self._index.close()
        self._lookups.close()
        for name in index_file.FILES:
            self.folder.remove(name)


def file_of(place: Place, data: Sequence[Buffer]) -> File:
    """What an entry's file is to be known as."""
    link = place.link
    nbytes = size_on_disk(sum(map(len, data)))
    about = link.parent, place.part, link.tokens, dict(link.identity)
    return _known(place.key, nbytes, *about), data


def _known(
    key: str,
    nbytes: int,
    parent: str,
    part: str,
    tokens: Sequence[int],
    identity: Mapping[str, str],
) -> Known:
    model, page_format = identity["model"], identity["page_format"]
    return Row(key, parent, part, len(tokens), nbytes, model, page_format), tokens
