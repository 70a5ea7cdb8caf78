"""Asynchronous front end to the page store.

One thread writes entries from a queue of bounded bytes; when the queue is full, entries are dropped
and counted. A few threads read ahead, and a read gives up after a time limit. Any failure counts as
a miss: it is counted, logged once for each kind, and never raised.

These threads see bytes only.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from paged_kv.store.entry_file import Entry
from paged_kv.store.errors import InvalidEntry
from paged_kv.store.keys import EntryPlace
from paged_kv.store.limits import Written
from paged_kv.store.lookup import Wanted
from paged_kv.store.lookup_counts import LookupCounts
from paged_kv.store.page_store import FAULTS, PageStore
from paged_kv.store.write_queue import Faults, WriteQueue

# Two reader threads saturate decoding with a disk of 1 GB/s; a few more hide its latency.
READERS = 4
READ_PATIENCE_S = 5.0
QUEUE_BYTES = 512 << 20
# A process that is killed loses so many lookups. Saving them writes 128 kB.
MOST_UNSAVED = 1000

Result = TypeVar("Result")


@dataclass(frozen=True)
class StoreStats:
    """Counts of what a store did for this process.

    Attributes:
        tokens_found: tokens of prefix hits that came from the store; a `TieredStore` counts them.
        entries_read: files whose content was used.
        bytes_read: of their arrays.
        entries_written: files that were stored.
        bytes_written: of their arrays.
        bytes_today: bytes that all processes have written to the disk since midnight, UTC.
        bytes_in_all: bytes that all processes have written to the disk since the store was made.
        dropped: entries that were not stored, by reason.
        errors: failures, by kind.
    """

    tokens_found: int
    entries_read: int
    bytes_read: int
    entries_written: int
    bytes_written: int
    bytes_today: int
    bytes_in_all: int
    dropped: Mapping[str, int]
    errors: Mapping[str, int]

    def __add__(self, other: StoreStats) -> StoreStats:
        """The sum of two tiers."""
        counts = {
            name: value + getattr(other, name)
            for name, value in vars(self).items()
            if isinstance(value, int)
        }
        return replace(
            self,
            **counts,
            dropped=Counter(self.dropped) + Counter(other.dropped),
            errors=Counter(self.errors) + Counter(other.errors),
        )


def stats_of(counts: Counter[str], written: Written, faults: Faults) -> StoreStats:
    """The counts of one tier, of which tokens are not counted here."""
    names = "entries_read", "bytes_read", "entries_written", "bytes_written"
    return StoreStats(
        tokens_found=0,
        **{name: counts[name] for name in names},
        bytes_today=written.bytes_today,
        bytes_in_all=written.in_all,
        dropped=dict(faults.dropped),
        errors=dict(faults.errors),
    )


class BackgroundStore:
    """Reads and writes a page store without blocking on writes and without raising.

    Args:
        store: the page store; `close` closes it.
        queue_bytes: the most bytes that wait to be written.
        patience_s: seconds that reading one file may take.

    Attributes:
        label: names this kind of tier.
        queue: what waits to be written.
        faults: counts what went wrong.
        lookups: how often blocks of prompts were looked up, in earlier processes too.
    """

    label = "folder"

    def __init__(
        self,
        store: PageStore,
        queue_bytes: int = QUEUE_BYTES,
        patience_s: float = READ_PATIENCE_S,
    ) -> None:
        self.store = store
        self._patience_s = patience_s
        self._counts: Counter[str] = Counter()
        self._late: list[Future[Any]] = []
        self.faults = Faults(str(store.path))
        self.queue = WriteQueue(store, queue_bytes, self.faults)
        self.lookups = LookupCounts(self._opened())
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="paged-kv-read")
        # At interpreter exit too, so that queued entries are written.
        parts = self.queue, self._readers, store, self.lookups
        self._close = weakref.finalize(self, _close, *parts)

    def close(self) -> None:
        """Write the queued entries and close the folder. Later calls do nothing."""
        self._close()

    def record(self, digest: str) -> None:
        """Count that a block was looked up."""
        self.lookups.record(digest)
        if self.lookups.num_unsaved >= MOST_UNSAVED:
            self.queue.add_lookups(self.lookups.unsaved())

    def ask(self, wanted: Wanted, waits: object = None) -> dict[str, int]:
        """The bytes of what the folder holds for a prompt, by key."""
        return self._wait(self._submit(self.store.sizes, wanted.places())) or {}

    def start(self, place: EntryPlace) -> Future[Entry] | None:
        """Begin to read an entry; None while a reader hangs."""
        return self._submit(self.store.get, place)

    def finish(
        self, reading: Future[Entry] | None, place: EntryPlace, waits: object = None
    ) -> Entry | None:
        """The entry that `start` has begun to read; None if it cannot be had. How long a prompt
        waits for servers does not matter here."""
        entry = self._wait(reading, place)
        if entry is not None:
            self._counts["entries_read"] += 1
            self._counts["bytes_read"] += entry.nbytes
        return entry

    def stats(self) -> StoreStats:
        """The counts so far."""
        return stats_of(self._counts + self.queue.counts, self.store.written, self.faults)

    def _opened(self) -> bytes:
        """Bring the folder below the cap; returns the look-ups that processes have saved."""
        try:
            self.store.keep_below_the_cap()
            return self.store.read_lookups()
        except FAULTS as error:
            self.faults.note(error)
            return b""

    def _submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result] | None:
        """Give work to a reader; None while a reader hangs on a disk that does not answer."""
        self._late = [each for each in self._late if not each.done()]
        if self._late or not self._close.alive:
            return None
        try:
            return self._readers.submit(work, *arguments)
        except RuntimeError:
            # The interpreter is exiting.
            return None

    def _wait(
        self, future: Future[Result] | None, place: EntryPlace | None = None
    ) -> Result | None:
        if future is None:
            return None
        if not wait([future], self._patience_s).done:
            self._late.append(future)
            self.faults.note(TimeoutError(f"no answer in {self._patience_s:g} s"))
            return None
        try:
            return future.result()
        except FAULTS as error:
            self.faults.note(error)
            if place is not None and isinstance(error, InvalidEntry):
                self.queue.discard([place.key])
            if isinstance(error, sqlite3.Error):
                self.queue.mend()
        return None


def _close(
    queue: WriteQueue, readers: ThreadPoolExecutor, store: PageStore, lookups: LookupCounts
) -> None:
    if lookups.num_unsaved:
        queue.add_lookups(lookups.unsaved())
    has_ended = queue.close()
    readers.shutdown(wait=False, cancel_futures=True)
    # A hanging writer may resume later: its folder's descriptor must not be reused by then.
    if has_ended:
        store.close()
