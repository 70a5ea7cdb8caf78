"""Stores entries in a folder of page files under a byte cap, shared by processes.

A writer locks the folder; the system releases the lock of a process that dies. The lock's holder
takes the files it finds as the truth. It removes temporary files, which dead writers left, and
brings the index in line with the files. Everything in the folder counts against the cap, also
files of others. Eviction happens before a file is written, so the cap holds at every instant.

Readers take no lock: a file is complete or absent. Every read verifies the file and compares it
with what was asked for.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from filelock import FileLock, Timeout

from paged_kv.allocator.prefixes.eviction import LEAST_WORTH, EvictionPolicy
from paged_kv.store import index as index_file
from paged_kv.store.entry_file import (
    MAX_HEADER_BYTES,
    SUFFIX,
    Buffer,
    Entry,
    decode,
    decode_place,
    encode,
    file_name,
)
from paged_kv.store.errors import InvalidEntry, NewerVersion, OtherEntry, unusable
from paged_kv.store.folder import LOCK, TAG, Folder, is_page_file, is_temporary, size_on_disk
from paged_kv.store.index import Index, Row
from paged_kv.store.keys import EntryPlace, Fields
from paged_kv.store.limits import (
    LEDGER,
    Limits,
    Written,
    read_written,
    victims,
    write_written,
)
from paged_kv.store.lookup_counts import SAVED_BYTES

MIN_BYTES = 8 << 20
MIN_FREE_BYTES = 1 << 30
LOOKUPS = "lookups"
# Bytes that the index, the folder itself and its two small files may grow by while one file is
# written; a small file and its replacement are there at once.
_MARGIN = index_file.ROOM + (64 << 10) + 2 * SAVED_BYTES + (16 << 10)

FAULTS = (OSError, sqlite3.Error, MemoryError, InvalidEntry)
"""The errors that a faulty disk can cause."""


class Outcome(Enum):
    """The result of storing an entry."""

    STORED = "stored"
    KNOWN = "known"
    NO_ROOM = "no room"
    BUDGET_SPENT = "the day's budget is spent"


@dataclass
class Contents:
    """The content of a locked folder.

    Attributes:
        used: bytes that everything takes on disk.
        files: the keys of entries, and the bytes of their files.
        others: names and bytes of files that are not the store's.
    """

    used: int
    files: dict[str, int]
    others: dict[str, int]


@dataclass(frozen=True)
class Finding:
    """A file, and what is wrong with it.

    Attributes:
        name: of the file.
        problem: what is wrong with it.
        nbytes: bytes that it takes on disk.
        removable: whether `gc` removes it, if it still exists.
    """

    name: str
    problem: str
    nbytes: int
    removable: bool


class PageStore:
    """Entries in a folder.

    All methods may be called from any thread, and raise what `FAULTS` lists.

    Args:
        path: the folder; it is created if missing.
        max_bytes: the most bytes that everything in it may take, at any time.
        min_free_bytes: bytes that the disk must still have free.
        patience_s: seconds to wait for other processes that write.
        policy: which entries to evict first.
        daily_bytes: the most bytes to write to the folder in a day; None for any number.

    Attributes:
        discarded: useless files found in the folder so far.
        lookups: the index, on a connection of its own: it does not wait for writers of files.
        written: the bytes written by all processes, as far as this one has seen.
        lack: what the latest entry lacked for which there was no room, and what to change.

    Raises:
        ValueError: max_bytes is too small for the index and any entry.
        StoreError: the folder cannot be used; the message says why.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int,
        *,
        min_free_bytes: int = MIN_FREE_BYTES,
        patience_s: float = 10.0,
        policy: EvictionPolicy = LEAST_WORTH,
        daily_bytes: int | None = None,
    ) -> None:
        if max_bytes < MIN_BYTES:
            raise ValueError(
                f"store_bytes must be at least {MIN_BYTES:,}, as the index takes some of it, "
                f"got {max_bytes:,}"
            )
        self.limits = Limits(max_bytes, min_free_bytes)
        self._policy = policy
        self._daily_bytes = daily_bytes
        self.written = Written()
        self.discarded: list[Finding] = []
        self.lack = ""
        self.path = Path(path).expanduser().absolute()
        self.folder = Folder(self.path)
        self._thread_lock = threading.RLock()
        self._lock = FileLock(self.path / LOCK, timeout=patience_s, mode=0o600)
        self._index, self.lookups = Index(self.folder), Index(self.folder)
        try:
            with self._alone():
                self.folder.claim()
                self._contents()
                self.written = read_written(self.folder)
        except FAULTS as error:
            self.close()
            raise unusable(self.path, error) from None

    def __enter__(self) -> PageStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder and its index."""
        with self._thread_lock:
            self._index.close()
            self.lookups.close()
            self.folder.close()

    def get(self, place: EntryPlace) -> Entry:
        """The entry stored at a place.

        Raises:
            FileNotFoundError: none is stored there.
            InvalidEntry: the file is damaged, or holds another entry.
        """
        entry = decode(self.folder.read(file_name(place.key)), place.key)
        if entry.place != place:
            raise OtherEntry("the file holds other tokens, or pages of another model")
        return entry

    def sizes(self, places: Iterable[EntryPlace]) -> dict[str, int]:
        """The bytes of the files of those entries that are there, by key."""
        found = {place.key: self.folder.size(file_name(place.key)) for place in places}
        return {key: nbytes for key, nbytes in found.items() if nbytes}

    def stored_keys(self) -> set[str]:
        """The keys of all entries."""
        return self.lookups.keys()

    def rows(self) -> list[Row]:
        """All entries, the most recently used first."""
        return self.lookups.rows()

    def put(self, entries: Iterable[Entry], keep: Collection[str] = ()) -> list[Outcome]:
        """Store entries; returns an outcome for each. If there is no room, this evicts the least
        recently used entries, but none of `keep`. Entries stored before survive any failure."""
        outcomes, added = [], []
        with self.exclusive() as contents:
            before = self.written = read_written(self.folder)
            try:
                for row, data in map(_file_of, entries):
                    outcomes.append(self._put(contents, row, data, keep))
                    if outcomes[-1] is Outcome.STORED:
                        added.append(row)
            finally:
                self._index.add(added)
                if self.written != before:
                    write_written(self.folder, self.written)
                self.folder.sync()
        return outcomes

    def may_write(self, nbytes: int) -> bool:
        """Whether the day's budget holds so many bytes more."""
        return self._daily_bytes is None or (self.written.bytes_today + nbytes <= self._daily_bytes)

    def read_lookups(self) -> bytes:
        """The look-ups that processes have saved, the latest last."""
        try:
            return self.folder.read(LOOKUPS, SAVED_BYTES)
        except FileNotFoundError:
            return b""

    def add_lookups(self, lookups: bytes) -> None:
        """Append look-ups to the saved ones; the earliest are dropped."""
        with self._alone():
            self.folder.write(LOOKUPS, [(self.read_lookups() + lookups)[-SAVED_BYTES:]])

    def eviction_order(self) -> list[str]:
        """The keys of all entries, the first to evict first."""
        return self._index.in_order(self._policy)

    def touch(self, keys: Sequence[str]) -> None:
        """Note entries as used now, the first of them most recently."""
        self._index.touch(keys)

    def keep_below_the_cap(self) -> None:
        """Evict what `max_bytes` does not allow, because it was more before."""
        with self.exclusive() as contents:
            self._evict(contents, contents.used - self.limits.max_bytes)

    def discard(self, keys: Sequence[str]) -> int:
        """Remove the entries that exist; returns how many did."""
        with self.exclusive() as contents:
            there = [key for key in keys if key in contents.files]
            self._discard(there)
            return len(there)

    @contextmanager
    def exclusive(self) -> Iterator[Contents]:
        """Lock the folder and bring the index in line with its files.

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
        self, contents: Contents, row: Row, data: Sequence[Buffer], keep: Collection[str]
    ) -> Outcome:
        if row.key in contents.files:
            return Outcome.KNOWN
        if not self.may_write(row.nbytes):
            return Outcome.BUDGET_SPENT
        more = row.nbytes + _MARGIN
        excess = self.limits.excess(contents.used, self.folder.free_bytes(), more)
        if not self._evict(contents, excess, keep):
            self.lack = self.limits.lack(contents.used, self.folder.free_bytes(), more)
            return Outcome.NO_ROOM
        self.folder.write(file_name(row.key), data)
        self.written = self.written.plus(row.nbytes)
        contents.files[row.key] = row.nbytes
        # Count the index's row too: it is added when all files are written.
        contents.used += row.nbytes + index_file.ROW_BYTES
        return Outcome.STORED

    def _evict(self, contents: Contents, excess: int, keep: Collection[str] = ()) -> bool:
        """Evict entries until there are `excess` bytes less; false, and nothing goes, if all but
        those of `keep` are fewer."""
        if excess <= 0:
            return True
        order = [(key, contents.files.get(key, 0)) for key in self.eviction_order()]
        evicted = victims(order, excess, keep)
        if evicted is None:
            return False
        self._discard(evicted)
        contents.used -= sum(contents.files.pop(key, 0) for key in evicted)
        return True

    def _discard(self, keys: Sequence[str]) -> None:
        removed = [key for key in keys if self.folder.remove(file_name(key))]
        self._index.remove(removed)
        if len(removed) < len(keys):
            raise OSError(f"files that cannot be removed: {len(keys) - len(removed)}")

    def _contents(self) -> Contents:
        """The folder's content, after removing files of dead writers and updating the index."""
        sizes = self.folder.scan()
        for name in [name for name in sizes if is_temporary(name)]:
            self._remove_faulty(name, "left by a writer that died", sizes.pop(name))
        files = {
            name.removesuffix(SUFFIX): size for name, size in sizes.items() if is_page_file(name)
        }
        if self._index.is_damaged or self.lookups.is_damaged or not self._align(files):
            self._remove_index()
            self._align(files)
        own = {file_name(key) for key in files} | set(index_file.FILES)
        own |= {LOCK, TAG, LEDGER, LOOKUPS}
        others = {name: size for name, size in sizes.items() if name not in own}
        # Scan again: the index may have grown.
        return Contents(sum(self.folder.scan().values()), files, others)

    def _align(self, files: dict[str, int]) -> bool:
        """Make the index list exactly these files; false if it is damaged."""
        try:
            known = self._index.keys()
            self._index.remove(list(known - files.keys()))
            found = [self._found(key, files[key]) for key in files.keys() - known]
            self._index.add([row for row in found if row is not None])
        except sqlite3.DatabaseError:
            if not self._index.is_damaged:
                raise
            return False
        return True

    def _found(self, key: str, nbytes: int) -> Row | None:
        """The row of a file that the index lacks. Removes a file that is not an entry; keeps a file
        of another version, which counts against the cap."""
        try:
            data = self.folder.read(file_name(key), MAX_HEADER_BYTES)
            return _row(key, nbytes, *decode_place(data))
        except NewerVersion:
            return None
        except (InvalidEntry, KeyError) as error:
            self._remove_faulty(file_name(key), f"damaged: {error}", nbytes)
            return None

    def _remove_faulty(self, name: str, problem: str, nbytes: int) -> None:
        self.folder.remove(name)
        self.discarded.append(Finding(name, problem, nbytes, True))

    def _remove_index(self) -> None:
        self._index.close()
        self.lookups.close()
        for name in index_file.FILES:
            self.folder.remove(name)


def _file_of(entry: Entry) -> tuple[Row, Sequence[Buffer]]:
    """An entry's row, and the bytes of its file."""
    place, data = entry.place, encode(entry)
    nbytes = size_on_disk(sum(map(len, data)))
    return _row(place.key, nbytes, place.part, len(place.link.tokens), place.link.identity), data


def _row(key: str, nbytes: int, part: str, num_tokens: int, identity: Fields) -> Row:
    of = dict(identity)
    return Row(key, part, num_tokens, nbytes, of["model"], of["page_format"])
