"""Writes entries behind the back of whoever made them: a bounded queue, and its thread."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paged_kv.store.blob_store import BlobStore, Outcome
from paged_kv.store.entry_file import Entry, encode
from paged_kv.tiers.faults import Faults
from paged_kv.tiers.seal import Sealing
from paged_kv.tiers.waits import Pause

SLOW = "the tier is slower than what it is given"
PAUSED = "the tier has failed a moment ago"
FULL = "the tier is full"
FAILED = "the write failed"
LATE = "the tier did not take them before the end"
# Keys that are known to be there: 64 MB of memory at most.
_MOST_KNOWN = 1 << 18
# Other work has no bytes that the queue's limit would count, so it has a limit of its own.
_MOST_WORK = 1000


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
    dropped and counted.

    Args:
        blobs: takes them.
        seal: names and seals them.
        faults: counts what is lost.

    Attributes:
        counts: "entries_written" and "bytes_written".
    """

    def __init__(self, blobs: BlobStore, seal: Sealing, faults: Faults) -> None:
        self.counts: Counter[str] = Counter()
        self._blobs = blobs
        self._seal = seal
        self._faults = faults
        self._pause = Pause()
        self._known: OrderedDict[str, None] = OrderedDict()
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

    def note(self, key: str, *, is_there: bool) -> None:
        """Note whether an entry is stored."""
        with self._changed:
            self._known.pop(key, None)
            if is_there:
                self._known[key] = None
                if len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)

    def has_room(self, nbytes: int) -> bool:
        """Whether the queue takes `nbytes` now; if not, this counts a drop. An empty queue takes
        any number."""
        refusal = self._blobs.refusal(nbytes)
        if self._pause.is_on:
            self._faults.drop(PAUSED)
        elif refusal:
            self._faults.drop(refusal.value)
        elif self._waiting_bytes and self._waiting_bytes + nbytes > self._blobs.queue_bytes:
            self._faults.drop(SLOW)
        else:
            return True
        return False

    def save(self, entry: Entry, path: Sequence[str] = ()) -> None:
        """Queue an entry to be written; ask `has_room` first. `path` are the keys of entries that
        are needed together with it: storing it does not evict them."""
        with self._changed:
            if self._add(_Job(entry, path)):
                self._queued.add(entry.place.key)

    def do(self, work: Callable[[], object], *, is_first: bool = False) -> None:
        """Queue other work, which follows the entries that are written in the same batch, unless it
        is to come first. What it raises is counted."""
        with self._changed:
            if len(self._jobs) < _MOST_WORK:
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
            self._faults.drop(LATE, lost)
        return not self._thread.is_alive()

    def _add(self, job: _Job) -> bool:
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
                self._faults.note(error)

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
            files = [self._file(entry) for entry in entries]
            outcomes = self._blobs.put(files, set(map(self._seal.name, keep)))
        except Exception as error:  # as above: what cannot be written is dropped, and noted
            self._faults.note(error)
            self._drop(entries, FULL if getattr(error, "is_full", False) else FAILED)
            self._pause.note_failure()
            return
        self._pause.note_success()
        for entry, outcome in zip(entries, outcomes, strict=True):
            if outcome is Outcome.STORED:
                self.counts["entries_written"] += 1
                self.counts["bytes_written"] += entry.nbytes
            if outcome in (Outcome.STORED, Outcome.KNOWN):
                self._end(entry, is_there=True)
            else:
                self._drop([entry], outcome.value, self._blobs.lack)

    def _file(self, entry: Entry) -> tuple[str, list[bytes | memoryview]]:
        name = self._seal.name(entry.place.key)
        return name, self._seal.sealed(name, encode(entry))

    def _drop(self, entries: Sequence[Entry], reason: str, details: str = "") -> None:
        for entry in entries:
            self._end(entry, is_there=False)
        self._faults.drop(reason, len(entries), details)

    def _end(self, entry: Entry, *, is_there: bool) -> None:
        """Note what has become of a queued entry."""
        self.note(entry.place.key, is_there=is_there)
        self._queued.discard(entry.place.key)
