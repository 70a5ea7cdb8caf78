"""The queue of entries to write, and the thread that writes them and counts its faults."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paged_kv.store.entry_file import Entry
from paged_kv.store.page_store import FAULTS, Outcome, PageStore

# Notes of use have no bytes that the queue's limit would count, so their number has a limit.
_MOST_NOTES = 1000
NO_ROOM = "there is no room, and nothing that could go"


@dataclass(frozen=True)
class _Job:
    """A job for the writer: store an entry, note entries as used, remove damaged ones, or save
    look-ups."""

    entry: Entry | None = None
    path: Sequence[str] = ()
    damaged: Sequence[str] | None = None
    lookups: bytes = b""

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


Work = TypeVar("Work", Entry, _Job)


class Writer(ABC, Generic[Work]):
    """A bounded queue, and the thread that writes what is in it.

    Args:
        name: of the thread.
        max_bytes: the most that wait.
        faults: counts what is lost.

    Attributes:
        counts: "entries_written" and "bytes_written".
    """

    late: str  # why what is left at the end is lost
    batch_bytes = 1  # a batch ends with the job that reaches so many
    patience_s: float  # how long `close` waits for the thread

    def __init__(self, name: str, max_bytes: int, faults: Faults) -> None:
        self.counts: Counter[str] = Counter()
        self._faults = faults
        self._max_bytes = max_bytes
        self._jobs: deque[Work] = deque()
        self._waiting_bytes = 0
        self._is_writing = self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def flush(self) -> bool:
        """Wait until the queue is empty; false if that takes too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._jobs and not self._is_writing, self.patience_s
            )

    def close(self) -> bool:
        """Write what is queued and end the thread; false if it hangs."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(self.patience_s)
        with self._changed:
            lost = sum(job.nbytes > 0 for job in self._jobs)
            self._jobs.clear()
        if lost:
            self._faults.drop(self.late, lost)
        return not self._thread.is_alive()

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more fit in the queue; an empty queue takes any number."""
        with self._changed:
            return not self._waiting_bytes or self._waiting_bytes + nbytes <= self._max_bytes

    @abstractmethod
    def write(self, jobs: Sequence[Work]) -> None:
        """Write one batch, in the queue's thread; raises nothing."""

    def _add(self, job: Work) -> bool:
        """Queue a job; false at the end."""
        with self._changed:
            if not self._is_closing:
                self._jobs.append(job)
                self._waiting_bytes += job.nbytes
                self._changed.notify_all()
            return not self._is_closing

    def _run(self) -> None:
        while jobs := self._next_batch():
            try:
                self.write(jobs)
            finally:
                with self._changed:
                    self._waiting_bytes -= sum(job.nbytes for job in jobs)
                    self._is_writing = False
                    self._changed.notify_all()

    def _next_batch(self) -> list[Work]:
        """Wait for the next batch; an empty one ends the thread."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or self._is_closing)
            batch: list[Work] = []
            while self._jobs and sum(job.nbytes for job in batch) < self.batch_bytes:
                batch.append(self._jobs.popleft())
            self._is_writing = bool(batch)
            return batch


class WriteQueue(Writer[_Job]):
    """Entries on their way into a store."""

    late = "the disk did not take them before the end"
    batch_bytes = 64 << 20  # which scans the folder once, while other processes wait for its lock
    patience_s = 60.0  # for an uncommonly slow disk

    def __init__(self, store: PageStore, max_bytes: int, faults: Faults) -> None:
        super().__init__("paged-kv-write", max_bytes, faults)
        self._store = store
        self._known = self._stored_keys()

    def knows(self, key: str) -> bool:
        """Whether an entry is stored or queued, as far as this process has seen."""
        return key in self._known

    def has_room(self, nbytes: int) -> bool:
        """Whether the queue takes `nbytes` now; if not, this counts a drop."""
        if not self.fits(nbytes):
            self._faults.drop("the disk is slower than what it is given")
            return False
        if not self._store.may_write(nbytes):
            self._faults.drop(Outcome.BUDGET_SPENT.value)
            return False
        return True

    def save(self, entry: Entry, path: Sequence[str] = ()) -> None:
        """Queue an entry to be written; ask `has_room` first. `path` are the keys of entries that
        are needed together with it: storing it does not evict them."""
        with self._changed:
            if self._add(_Job(entry, path)):
                self._known.add(entry.place.key)

    def touch(self, keys: Sequence[str]) -> None:
        """Queue a note that entries were used, the first of them most recently."""
        self._note(_Job(path=keys))

    def discard(self, keys: Sequence[str]) -> None:
        """Queue the removal of damaged entries."""
        self._known.difference_update(keys)
        self._note(_Job(damaged=keys))

    def add_lookups(self, lookups: bytes) -> None:
        """Queue look-ups to be saved."""
        self._note(_Job(lookups=lookups))

    def mend(self) -> None:
        """Queue a repair of the index, if it is damaged."""
        self._note(_Job(damaged=()))

    def _note(self, job: _Job) -> None:
        with self._changed:
            if len(self._jobs) < _MOST_NOTES:
                self._add(job)

    def write(self, jobs: Sequence[_Job]) -> None:
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
            if lookups := b"".join(job.lookups for job in jobs):
                self._store.add_lookups(lookups)
        except Exception as error:
            self._faults.note(error)
            if lost := len(entries) - len(outcomes):
                self._faults.drop("the disk failed", lost)
        self._count(entries, outcomes)

    def _count(self, entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> None:
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
            stored_keys = self._stored_keys()
            with self._changed:
                jobs = [job.entry.place.key for job in self._jobs if job.entry is not None]
                self._known = stored_keys.union(jobs)

    def _stored_keys(self) -> set[str]:
        try:
            return self._store.stored_keys()
        except FAULTS as error:
            self._faults.note(error)
            return set()
