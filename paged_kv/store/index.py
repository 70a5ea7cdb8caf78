"""An sqlite3 index of a store's entries and the order of their use.

The index may be lost at any time: the files are the truth, and `PageStore` brings the index in line
with them whenever it locks the folder. So the index is never flushed, and a damaged one is replaced
by a new one. A counter orders uses, as a clock may jump.

Each transaction has few rows and is checkpointed at once, so that ROOM bounds the bytes that the
index grows by meanwhile.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from paged_kv.allocator.prefixes.eviction import EvictionPolicy, Ranking
from paged_kv.allocator.prefixes.uses import Use
from paged_kv.store.folder import Folder

NAME = "index.sqlite3"
FILES = (NAME, NAME + "-wal", NAME + "-shm")
# Rows of one transaction, each of which may touch a few pages of 4 kB.
_ROWS = 16
ROOM = 1 << 20
# The most that the file grows by for one row.
ROW_BYTES = 1 << 10

_SCHEMA_VERSION = 4
_SCHEMA = """
    CREATE TABLE entries (
        key TEXT PRIMARY KEY, part TEXT NOT NULL, num_tokens INTEGER NOT NULL,
        nbytes INTEGER NOT NULL, first_used INTEGER NOT NULL, last_used INTEGER NOT NULL,
        uses INTEGER NOT NULL, model TEXT NOT NULL, page_format TEXT NOT NULL
    ) WITHOUT ROWID;
"""
_COLUMNS = "key, part, num_tokens, nbytes, model, page_format"


@dataclass(frozen=True)
class Row:
    """One stored entry.

    Attributes:
        key: names its file.
        part: which part of the block it holds.
        num_tokens: of the block.
        nbytes: bytes that the file takes on disk.
        model: the model that computed the pages.
        page_format: how pages hold numbers.
    """

    key: str
    part: str
    num_tokens: int
    nbytes: int
    model: str
    page_format: str


class Index:
    """The index of a folder, opened at its first use, and again when another process replaced it.
    One thread uses it at a time.

    Attributes:
        is_damaged: whether it should be replaced.

    Every other method raises sqlite3.Error if it cannot be read or written, and OSError if the
    folder is not there.
    """

    def __init__(self, folder: Folder) -> None:
        self.is_damaged = False
        self._folder = folder
        self._path = folder.path / NAME
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._file = (0, 0)

    def close(self) -> None:
        """Close the connection, if it is open."""
        with self._lock:
            if self._connection is not None:
                with suppress(sqlite3.Error):
                    self._connection.close()
            self._connection = None
            self.is_damaged = False

    def keys(self) -> set[str]:
        """All entries."""
        return {key for (key,) in self._all("SELECT key FROM entries")}

    def rows(self) -> list[Row]:
        """All entries, the most recently used first."""
        found = self._all(f"SELECT {_COLUMNS} FROM entries ORDER BY last_used DESC")
        return [Row(*each) for each in found]

    def in_order(self, policy: EvictionPolicy) -> list[str]:
        """The keys of all entries, in the order in which a policy evicts them."""
        found = self._all("SELECT key, first_used, last_used, uses FROM entries")
        rank = Ranking(policy)
        ranked = [(rank(Use(*use)), use[1], key) for key, *use in found]
        return [key for *_, key in sorted(ranked)]

    def add(self, rows: Sequence[Row]) -> None:
        """Add entries as the most recently used, the first of them most recently."""
        with self._lock:
            uses = self._next_uses(len(rows))
            self._write(
                f"INSERT OR REPLACE INTO entries ({_COLUMNS}, first_used, last_used, uses) "
                "VALUES (?,?,?,?,?,?,?,?,1)",
                [(*astuple(row), use, use) for row, use in zip(rows, uses, strict=True)],
            )

    def touch(self, keys: Sequence[str]) -> None:
        """Note entries as the most recently used, the first of them most recently."""
        with self._lock:
            self._write(
                "UPDATE entries SET last_used = ?, uses = uses + 1 WHERE key = ?",
                list(zip(self._next_uses(len(keys)), keys, strict=True)),
            )

    def remove(self, keys: Sequence[str]) -> None:
        """Remove entries."""
        self._write("DELETE FROM entries WHERE key = ?", [(key,) for key in keys])

    def _next_uses(self, count: int) -> range:
        """The use counts of the next `count` entries, the latest first."""
        ((latest,),) = self._all("SELECT coalesce(max(last_used), 0) FROM entries")
        return range(latest + count, latest, -1)

    def _write(self, statement: str, rows: Sequence[tuple[str | int, ...]]) -> None:
        with self._opened() as connection:
            for start in range(0, len(rows), _ROWS):
                connection.execute("BEGIN IMMEDIATE")
                try:
                    connection.executemany(statement, rows[start : start + _ROWS])
                    connection.execute("COMMIT")
                except BaseException:
                    connection.rollback()
                    raise
                _fetched(connection, "PRAGMA wal_checkpoint(TRUNCATE)")

    def _all(self, statement: str, *values: str) -> list[tuple[Any, ...]]:
        with self._opened() as connection:
            return _fetched(connection, statement, *values)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._connection is not None and not self._is_there():
                self.close()
            try:
                if self._connection is None:
                    self._folder.require_there()
                    _require_no_links(self._folder.path)
                    self._connection = _connected(self._path)
                    self._file = _identity(self._path)
                yield self._connection
            except sqlite3.DatabaseError as error:
                # A new index does not help against another process's lock or a full disk.
                elsewhere = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)
                self.is_damaged = getattr(error, "sqlite_errorcode", None) not in elsewhere
                raise

    def _is_there(self) -> bool:
        """Whether the file is still the one that was opened."""
        try:
            return _identity(self._path) == self._file
        except OSError:
            return False


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=5, isolation_level=None, check_same_thread=False)
    try:
        _fetched(connection, "PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        if _fetched(connection, "PRAGMA user_version") != [(_SCHEMA_VERSION,)]:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DROP TABLE IF EXISTS entries")
            for statement in _SCHEMA.split(";")[:-1]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _fetched(connection: sqlite3.Connection, statement: str, *values: str) -> list[tuple[Any, ...]]:
    with closing(connection.execute(statement, values)) as cursor:
        return cursor.fetchall()


def _require_no_links(folder: Path) -> None:
    """Raise if an index file is a link, as sqlite3 would follow it. No other user can make one
    after this check: the folder's mode is 0700."""
    for name in FILES:
        try:
            mode = os.lstat(folder / name).st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode):
            raise sqlite3.DatabaseError(f"{folder / name} is not a regular file")


def _identity(path: Path) -> tuple[int, int]:
    about = os.lstat(path)
    return about.st_dev, about.st_ino
