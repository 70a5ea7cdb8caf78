"""A place that keeps entries, as prompts see it: a folder, or a server that machines share.

One question asks for a whole prompt, as its tokens alone name everything that may be of use.

Every failure is a miss, and the tier is left alone for a while after it, and a folder for as long
as a call still hangs. A prompt waits `patience_s` for its question, and as long for all its entries
together, besides what they take at 20 MB/s. So servers are of use that answer within half a second,
however many blocks are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from operator import itemgetter
from time import monotonic
from typing import Any, Protocol, TypeVar

from paged_kv.store.blob_store import MOST_ENTRY_BYTES, BlobStore, round_trips
from paged_kv.store.entry_file import (
    Buffer,
    Entry,
    Gone,
    InvalidEntry,
    OtherEntry,
    WrongSize,
    decode,
)
from paged_kv.store.keys import EntryPlace, Wanted
from paged_kv.store.writer import Pause, StoreStats, TierCounts, Writer

MOST_IN_BATCH = 1024
# Round trips on the way behind the one whose entries are used. With 16 MB in each, at 0.2 s, those
# on the way bring 240 MB/s; on loopback they keep as many threads busy with verifying.
_BATCHES_AHEAD = 2
_SLOWEST_BYTES_A_SECOND = 20 << 20
# Two threads saturate a disk of 1 GB/s, or Redis on loopback; more hide latency.
READERS = 4
# Of a prompt of 262,144 tokens with two groups of layers and states.
_MOST_ASKED = 4096

Sized = tuple[EntryPlace, int]
"""An entry's place, and the bytes that its tier has said to hold."""

Result = TypeVar("Result")


class Patience:
    """Seconds that may be waited, in all. One thread uses it.

    Attributes:
        left: as many now; none or fewer when all are waited.
    """

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self._allowed: set[str] = set()

    def allow(self, key: str, seconds: float) -> None:
        """Wait so much longer because of an entry; once, also if it is read again."""
        if key not in self._allowed:
            self._allowed.add(key)
            self.left += seconds

    def wait(self, future: Future[Any]) -> bool:
        """Wait until a future is done, or no seconds are left; whether it is done."""
        began = monotonic()
        is_done = bool(wait([future], max(0.0, self.left)).done)
        self.left -= monotonic() - began
        return is_done


Waits = dict[tuple["Tier", str], Patience]
"""The patience of one prompt: with each tier, to "ask" it and to "read" all its entries."""


class Source(Protocol):
    """What entries are read from, which `label` names in statistics. No method raises."""

    label: str

    def ask(self, wanted: Wanted, waits: Waits) -> Mapping[str, int]:
        """The bytes of what it holds for a prompt, by key."""
        ...

    def read(self, wanted: Sequence[Sized], waits: Waits) -> Iterator[Entry | None]:
        """Entries for a prompt, in order, None for each that cannot be had. Reading begins with the
        first, and goes on ahead of the one that is used."""
        ...


class Tier:
    """See `Source`.

    Args:
        blobs: its entries; `close` closes them.

    Attributes:
        blobs: as given.
        label: its kind, with a number if a store has several of the kind.
        is_shared: whether other machines use it too.
        queue: what waits to be written.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self.blobs = blobs
        self.label, self.is_shared = blobs.label, blobs.is_shared
        self.counts = TierCounts(blobs.name)
        self.queue = Writer(blobs, self.counts)
        self._seal = blobs.seal
        self._pause = Pause()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="paged-kv-read")
        self._calls: set[Future[Any]] = set()
        self._late: set[Future[Any]] = set()
        self._is_closed = False

    @property
    def is_paused(self) -> bool:
        """Whether it is left alone, as it has failed a moment ago, or a call hangs."""
        return self._pause.is_on or any(not call.done() for call in self._late)

    def close(self) -> None:
        """Write the queued entries and close the place. Later calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        has_ended = self.queue.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        # A hanging writer may resume later: its folder's descriptor must not be reused by then.
        if has_ended:
            self.blobs.close()

    def ask(self, wanted: Wanted, waits: Waits) -> Mapping[str, int]:
        places = wanted.places[:_MOST_ASKED]
        names = [self._seal.name(place.key) for place in places]
        patience = waits.setdefault((self, "ask"), Patience(self.blobs.patience_s))
        sizes = self._wait(self._submit(self.blobs.sizes, names), patience)
        found = {}
        for place, nbytes in zip(places, sizes or (), strict=False):
            is_there = self._seal.header_bytes < nbytes <= MOST_ENTRY_BYTES
            self.queue.record(place.key, is_there=is_there)
            if is_there:
                found[place.key] = nbytes
            elif nbytes:
                self.counts.record_error(WrongSize(f"an entry has {nbytes:,} bytes"))
        return found

    def read(self, wanted: Sequence[Sized], waits: Waits) -> Iterator[Entry | None]:
        batches = round_trips(wanted, itemgetter(1), self.blobs.get_bytes, MOST_IN_BATCH)
        patience = waits.setdefault((self, "read"), Patience(self.blobs.patience_s))
        coming = ((batch, self._begin(batch, patience)) for batch in batches)
        begun = deque(islice(coming, 1 + _BATCHES_AHEAD))
        while begun:
            batch, reading = begun.popleft()
            found = self._wait(reading, patience)
            for at, (place, _) in enumerate(batch):
                yield self._checked(place, None if found is None else found[at])
            begun.extend(islice(coming, 1))

    def touch(self, keys: Iterable[str]) -> None:
        """Record entries as used now, the first of them most recently."""
        if not self.is_shared:  # servers note it by themselves
            self.queue.do(partial(self.blobs.touch, [self._seal.name(key) for key in keys]))

    def stats(self) -> StoreStats:
        return self.counts.stats(self.blobs.written)

    def _begin(
        self, batch: Sequence[Sized], patience: Patience
    ) -> Future[list[Entry | InvalidEntry]] | None:
        """Begin one round trip; None during a pause."""
        reading = self._submit(self._read, batch)
        for place, nbytes in batch if reading is not None else ():
            patience.allow(place.key, nbytes / _SLOWEST_BYTES_A_SECOND)
        return reading

    def _checked(self, place: EntryPlace, entry: Entry | InvalidEntry | None) -> Entry | None:
        """What was read of a place, which is None if the call failed."""
        if isinstance(entry, Entry):
            self.counts.record_entry(entry, "read")
            return entry
        self.queue.record(place.key, is_there=False)
        if entry is not None:
            self.counts.record_error(entry)
            if not self.is_shared:  # a server gets a sound one
                remove = partial(self.blobs.remove, [self._seal.name(place.key)])
                self.queue.do(remove, is_first=True)  # before it is stored again
        return None

    def _read(self, batch: Sequence[Sized]) -> list[Entry | InvalidEntry]:
        """Runs on a reader thread."""
        names = [self._seal.name(place.key) for place, _ in batch]
        sizes = [nbytes for _, nbytes in batch]
        found = self.blobs.get(list(zip(names, sizes, strict=True)))
        return [
            self._decoded(place, name, data)
            for (place, _), name, data in zip(batch, names, found, strict=True)
        ]

    def _decoded(self, place: EntryPlace, name: str, data: Buffer) -> Entry | InvalidEntry:
        try:
            if not data:
                raise Gone("it has gone since the question")
            entry = decode(self._seal.opened(name, data), place.key)
            if entry.place != place:
                raise OtherEntry("it holds other tokens, or pages of another model")
        except InvalidEntry as error:
            return error
        return entry

    def _submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result] | None:
        if self.is_paused or self._is_closed:
            return None
        try:
            call = self._readers.submit(work, *arguments)
        except RuntimeError:
            return None  # the interpreter is exiting
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def _wait(self, future: Future[Result] | None, patience: Patience) -> Result | None:
        if future is None:
            return None
        if not patience.wait(future):
            self.counts.record_error(TimeoutError("no answer in the time that a prompt waits"))
            self._pause.record_failure()
            if not self.is_shared:  # a disk may hang for ever, and calls to servers have time-outs
                self._late = self._calls.copy()
            future.cancel()
            self.blobs.interrupt()
            return None
        try:
            result = future.result()
        except Exception as error:  # clients raise what they like: every failure is a miss
            self.counts.record_error(error)
            self._pause.record_failure()
            return None
        self._pause.record_success()
        return result
