"""The queue of entries to write, and the thread that writes them and counts its faults."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from paged_kv.store.entry_file import Entry
from paged_kv.store.page_store import FAULTS, Outcome, PageStore

# A batch scans the folder once. It is short, as other processes wait for its lock.
_BATCH_BYTES = 64 << 20
# Notes of use have no bytes that the queue's limit would count, so their number has a limit.
_MOST_NOTES = 1000
# With an uncommonly slow disk, entries still queued after this time are lost at process exit.
CLOSE_PATIENCE_S = 60.0
NO_ROOM = "there is no room, and nothing that could go"


@dataclass(frozen=True)
class _Job:
    """A job for the writer: store an entry, note entries as used, remove damaged ones, or save
    sights."""

    entry: Entry | None = None
    path: Sequence[str] = ()
    damaged: Sequence[str] | None = None
    sights: bytes = b""

    @property
    def nbytes(self) -> int:
        return 0 if self.entry is None else self.entry.nbytes


logger = logging.getLogger("paged_kv")


class Faults:
    """Counts faults and dropped entries, and warns of each kind once."""

    def __init__(self, name: str) -> None:
        self.errors: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._name = name
        self._lock = threading.Lock()

    def note(self, error: BaseException) -> None:
        """Count an error of the disk, or of its content."""
        kind = getattr(error, "kind", type(error).__name__)
        self._count(self.errors, kind, f"{kind}: {error}", 1)

    def drop(self, reason: str, count: int = 1, details: str = "") -> None:
        """Count entries that were not stored. The details are for the log alone."""
        message = f"pages were not stored: {reason}" + (f": {details}" if details else "")
        self._count(self.dropped, reason, message, count)

    def _count(self, counter: Counter[str], kind: str, message: str, count: int) -> None:
        with self._lock:
            is_first = not counter[kind]
            counter[kind] += count
        level = logging.WARNING if is_first else logging.DEBUG
        logger.log(level, "page store %s: %s (warned once; stats() counts)", self._name, message)


class WriteQueue:
    """Entries on their way into a store.

    Attributes:
        counts: "entries_written" and "bytes_written".
    """

    def __init__(self, store: PageStore, max_bytes: int, faults: Faults) -> None:
        self.counts: Counter[str] = Counter()
        self._store = store
        self._max_bytes = max_bytes
        self._faults = faults
        self._jobs: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._is_writing = self._is_closing = False
        self._changed = threading.Condition()
        self._stored = self._stored_keys()
        self._known = set(self._stored)
        self._thread = threading.Thread(target=self._run, name="paged-kv-write", daemon=True)
        self._thread.start()

    def knows(self, key: str) -> bool:
        """Whether an entry is stored or queued."""
        return key in self._known

    def has_stored(self, key: str) -> bool:
        """Whether an entry was there after the last write."""
        return key in self._stored

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more fit in the queue; an empty queue takes any number."""
        with self._changed:
            fits = not self._waiting_bytes or self._waiting_bytes + nbytes <= self._max_bytes
        if not fits:
            self._faults.drop("the disk is slower than what it is given")
        elif not self._store.may_write(nbytes):
            self._faults.drop(Outcome.BUDGET_SPENT.value)
            return False
        return fits

    def save(self, entry: Entry, path: Sequence[str]) -> None:
        """Queue an entry to be written."""
        self._add(_Job(entry, path))

    def touch(self, keys: Sequence[str]) -> None:
        """Queue a note that entries were used."""
        self._add(_Job(path=keys))

    def discard(self, keys: Sequence[str]) -> None:
        """Queue the removal of damaged entries."""
        self._known.difference_update(keys)
        self._add(_Job(damaged=keys))

    def add_sights(self, sights: bytes) -> None:
        """Queue sights to be saved."""
        self._add(_Job(sights=sights))

    def mend(self) -> None:
        """Queue a repair of the index, if it is damaged."""
        self._add(_Job(damaged=()))

    def flush(self) -> bool:
        """Wait until the queue is empty; false if that takes too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._jobs and not self._is_writing, CLOSE_PATIENCE_S
            )

    def close(self) -> bool:
        """Write the queued entries and end the thread; false if it hangs on the disk."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_PATIENCE_S)
        with self._changed:
            lost = sum(job.entry is not None for job in self._jobs)
            self._jobs.clear()
        if lost:
            self._faults.drop("the disk did not take them before the end", lost)
        return not self._thread.is_alive()

    def _add(self, job: _Job) -> None:
        with self._changed:
            is_note = job.entry is None
            if not self._is_closing and not (is_note and len(self._jobs) >= _MOST_NOTES):
                self._jobs.append(job)
                self._waiting_bytes += job.nbytes
                if job.entry is not None:
                    self._known.add(job.entry.place.key)
                self._changed.notify_all()

    def _run(self) -> None:
        while jobs := self._next_batch():
            try:
                self._do(jobs)
            finally:
                with self._changed:
                    self._waiting_bytes -= sum(job.nbytes for job in jobs)
                    self._is_writing = False
                    self._changed.notify_all()

    def _next_batch(self) -> list[_Job]:
        """Wait for the next batch; an empty one ends the thread."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or self._is_closing)
            batch: list[_Job] = []
            while self._jobs and sum(job.nbytes for job in batch) < _BATCH_BYTES:
                batch.append(self._jobs.popleft())
            self._is_writing = bool(batch)
            return batch

    def _do(self, jobs: Sequence[_Job]) -> None:
        """Do one batch. After any failure the thread continues with the next."""
        entries = [job.entry for job in jobs if job.entry is not None]
        paths = [job.path for job in jobs if job.path]
        damaged = [job.damaged for job in jobs if job.damaged is not None]
        outcomes: list[Outcome] = []
        try:
            if damaged:
                self._store.discard([key for keys in damaged for key in keys])
            if entries:
                outcomes = self._store.put(entries, {key for path in paths for key in path})
            for path in dict.fromkeys(map(tuple, paths)):
                self._store.touch(path)
            if sights := b"".join(job.sights for job in jobs):
                self._store.add_sights(sights)
        except Exception as error:
            self._faults.note(error)
            if lost := len(entries) - len(outcomes):
                self._faults.drop("the disk failed", lost)
        self._note(entries, outcomes)

    def _note(self, entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> None:
        stored = [
            entry
            for entry, outcome in zip(entries, outcomes, strict=False)
            if outcome is Outcome.STORED
        ]
        self.counts["entries_written"] += len(stored)
        self.counts["bytes_written"] += sum(entry.nbytes for entry in stored)
        if no_room := outcomes.count(Outcome.NO_ROOM):
            self._faults.drop(NO_ROOM, no_room, self._store.lack)
        if spent := outcomes.count(Outcome.BUDGET_SPENT):
            self._faults.drop(Outcome.BUDGET_SPENT.value, spent)
        if entries:
            self._stored = self._stored_keys()
            with self._changed:
                jobs = [job.entry.place.key for job in self._jobs if job.entry is not None]
                self._known = self._stored.union(jobs)

    def _stored_keys(self) -> set[str]:
        try:
            return self._store.stored_keys()
        except FAULTS as error:
            self._faults.note(error)
            return set()
