"""Writes entries behind the back of whoever made them: a bounded queue, and its thread. What a tier
has done and what went wrong is counted here too, and how long it is left alone after a failure."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from paged_kv.lru import LRU
from paged_kv.store.blob_store import BlobStore, Outcome, Written
from paged_kv.store.entry_file import Entry, encode

logger = logging.getLogger("paged_kv")

SLOW = "the tier is slower than what it is given"
PAUSED = "the tier has failed a moment ago"
FULL = "the tier is full"
FAILED = "the write failed"
LATE = "the tier did not take them before the end"
# Keys that are known to be there: 64 MB of memory at most.
_MOST_KNOWN = 1 << 18
# Other work has no bytes that the queue's limit would count, so it has a limit of its own.
_MOST_WORK = 1000
# A failure may take as long as a time-out, half a second, during which nobody else is served. So at
# most a third of the time goes to a dead server at first, and 2 % soon.
FIRST_S, LONGEST_S = 1.0, 30.0


@dataclass(frozen=True)
class StoreStats:
    """Counts of what a store did for this process.

    Attributes:
        tokens_found: tokens of prefix hits that came from the store.
        entries_read: entries whose content was used.
        bytes_read: of their arrays.
        entries_written: entries that were stored.
        bytes_written: of their arrays.
        bytes_today: bytes that were written since midnight, UTC: to a folder by all processes, to a
            server by this one.
        bytes_in_all: bytes that were written since the store was made, or to a server since this
            process began.
        dropped: entries that were not stored, by reason.
        errors: failures, by kind.
    """

    tokens_found: int = 0
    entries_read: int = 0
    bytes_read: int = 0
    entries_written: int = 0
    bytes_written: int = 0
    bytes_today: int = 0
    bytes_in_all: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: StoreStats) -> StoreStats:
        sums: dict[str, Any] = {}
        for name, value in vars(self).items():
            more = getattr(other, name)
            is_number = isinstance(value, int)
            sums[name] = value + more if is_number else dict(Counter(value) + Counter(more))
        return StoreStats(**sums)


class TierCounts:
    """Counts the fields of `StoreStats` for this process, and warns of each kind of fault once.

    Args:
        name: of the tier, for the log.
    """

    def __init__(self, name: str) -> None:
        self.sums: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._name = name
        self._lock = threading.Lock()

    def record_entry(self, entry: Entry, what: str) -> None:
        """Count an entry that was "read" or "written"."""
        self.sums[f"entries_{what}"] += 1
        self.sums[f"bytes_{what}"] += entry.nbytes

    def record_error(self, error: BaseException) -> None:
        """Count an error of the tier, or of its content."""
        kind = getattr(error, "kind", type(error).__name__)
        self._count(self.errors, kind, f"{kind}: {error}", 1)

    def record_drop(self, reason: str, count: int = 1, details: str = "") -> None:
        """Count entries that were not stored. The details are for the log alone."""
        message = f"pages were not stored: {reason}" + (f": {details}" if details else "")
        self._count(self.dropped, reason, message, count)

    def stats(self, written: Written) -> StoreStats:
        """The counts so far, with the bytes that the tier has taken."""
        counts: dict[str, Any] = {"dropped": dict(self.dropped), "errors": dict(self.errors)}
        counts |= {"bytes_today": written.bytes_today, "bytes_in_all": written.in_all}
        return StoreStats(**counts, **dict[str, Any](self.sums))

    def _count(self, counter: Counter[str], kind: str, message: str, count: int) -> None:
        with self._lock:
            is_first = not counter[kind]
            counter[kind] += count
        level = logging.WARNING if is_first else logging.DEBUG
        logger.log(level, "page store %s: %s (warned once; stats() counts)", self._name, message)


class Pause:
    """Doubles with each failure in a row. Threads may share it: each field is written at once."""

    def __init__(self) -> None:
        self._next_s = FIRST_S
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        return monotonic() < self._until

    def record_failure(self) -> None:
        """Begin a pause, unless one is on: several calls may fail at once."""
        if not self.is_on:
            self._until = monotonic() + self._next_s
            self._next_s = min(2 * self._next_s, LONGEST_S)

    def record_success(self) -> None:
        """Let the next pause be short."""
        self._next_s = FIRST_S


@dataclass(frozen=True)
class _Job:
    """Write an entry, and evict none of the keys `path` for it; or do other work, before or after
    the entries of the same batch."""

    entry: Entry | None = None
    path: Sequence[str] = ()
    work: Callable[[], object] | None = None
    is_first: bool = False

    @property
    def nbytes(self) -> int:
        return 0 if self.entry is None else self.entry.nbytes


class Writer:
    """Entries on their way into a tier. What does not fit, and what comes during a pause, is
    dropped and counted."""

    def __init__(self, blobs: BlobStore, counts: TierCounts) -> None:
        self._blobs = blobs
        self._counts = counts
        self._pause = Pause()
        self._known: LRU[str, None] = LRU(_MOST_KNOWN)
        self._queued: set[str] = set()
        self._jobs: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._is_writing = self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="paged-kv-write", daemon=True)
        self._thread.start()

    def knows(self, key: str) -> bool:
        """Whether an entry is stored or queued, as far as this process has seen."""
        return key in self._known or key in self._queued

    def record(self, key: str, *, is_there: bool) -> None:
        """Record whether an entry is stored."""
        with self._changed:
            self._known.pop(key, None)
            if is_there:
                self._known[key] = None

    def has_room(self, nbytes: int) -> bool:
        """Whether the queue takes `nbytes` now; if not, this counts a drop. An empty queue takes
        any number."""
        refusal = self._blobs.refusal(nbytes)
        if self._pause.is_on:
            self._counts.record_drop(PAUSED)
        elif refusal:
            self._counts.record_drop(refusal.value)
        elif self._waiting_bytes and self._waiting_bytes + nbytes > self._blobs.queue_bytes:
            self._counts.record_drop(SLOW)
        else:
            return True
        return False

    def save(self, entry: Entry, path: Sequence[str] = ()) -> None:
        """Queue an entry to be written; ask `has_room` first. `path` are the keys of entries that
        are needed together with it: storing it does not evict them."""
        with self._changed:
            if not self._is_closing:
                self._add(_Job(entry, path))
                self._queued.add(entry.place.key)

    def do(self, work: Callable[[], object], *, is_first: bool = False) -> None:
        """Queue other work, which follows the entries that are written in the same batch, unless it
        is to come first. What it raises is counted."""
        with self._changed:
            if len(self._jobs) < _MOST_WORK and not self._is_closing:
                self._add(_Job(work=work, is_first=is_first))

    def flush(self) -> bool:
        """Wait until the queue is empty; false if that takes too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._jobs and not self._is_writing, self._blobs.flush_s
            )

    def close(self) -> bool:
        """Write what is queued and end the thread; false if it hangs."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(self._blobs.flush_s)
        with self._changed:
            lost = sum(job.entry is not None for job in self._jobs)
            self._jobs.clear()
        if lost:
            self._counts.record_drop(LATE, lost)
        return not self._thread.is_alive()

    def _add(self, job: _Job) -> None:
        self._jobs.append(job)
        self._waiting_bytes += job.nbytes
        self._changed.notify_all()

    def _run(self) -> None:
        while jobs := self._next_batch():
            try:
                self._do([job for job in jobs if job.is_first])
                self._write([job for job in jobs if job.entry is not None])
                self._do([job for job in jobs if not job.is_first])
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
            nbytes = 0
            while self._jobs and nbytes < self._blobs.put_bytes:
                batch.append(self._jobs.popleft())
                nbytes += batch[-1].nbytes
            self._is_writing = bool(batch)
            return batch

    def _do(self, jobs: Sequence[_Job]) -> None:
        for work in [job.work for job in jobs if job.work is not None]:
            try:
                work()
            except Exception as error:  # clients raise what they like
                self._counts.record_error(error)

    def _write(self, jobs: Sequence[_Job]) -> None:
        """Write entries. After any failure the thread continues with the next."""
        entries = [job.entry for job in jobs if job.entry is not None]
        if not entries:
            return
        if self._pause.is_on:
            self._drop(entries, PAUSED)
            return
        keep = {key for job in jobs for key in job.path} if not self._blobs.is_shared else set()
        try:
            seal = self._blobs.seal
            names = [seal.name(entry.place.key) for entry in entries]
            files = [
                (name, seal.sealed(name, encode(entry)))
                for name, entry in zip(names, entries, strict=True)
            ]
            outcomes = self._blobs.put(files, set(map(seal.name, keep)))
        except Exception as error:  # as above: what cannot be written is dropped, and counted
            self._counts.record_error(error)
            self._drop(entries, FULL if getattr(error, "is_full", False) else FAILED)
            self._pause.record_failure()
            return
        self._pause.record_success()
        for entry, outcome in zip(entries, outcomes, strict=True):
            if outcome is Outcome.STORED:
                self._counts.record_entry(entry, "written")
            if outcome in (Outcome.STORED, Outcome.KNOWN):
                self._end(entry, is_there=True)
            else:
                self._drop([entry], outcome.value, self._blobs.lack)

    def _drop(self, entries: Sequence[Entry], reason: str, details: str = "") -> None:
        for entry in entries:
            self._end(entry, is_there=False)
        self._counts.record_drop(reason, len(entries), details)

    def _end(self, entry: Entry, *, is_there: bool) -> None:
        self.record(entry.place.key, is_there=is_there)
        self._queued.discard(entry.place.key)
