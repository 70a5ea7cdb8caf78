"""A tier on a server that several machines share.

One question asks for a whole prompt, as its tokens alone name everything that may be of use.

Every failure is a miss, and the server is left alone for a while after it. A prompt waits half a
second for its question, and as long for all its entries together, besides what they take at
20 MB/s. So servers are of use that answer within half a second, however many blocks are read.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, TypeVar

from paged_kv.store.background import StoreStats, stats_of
from paged_kv.store.entry_file import Buffer, Entry, decode
from paged_kv.store.errors import InvalidEntry, OtherEntry
from paged_kv.store.keys import EntryPlace
from paged_kv.store.lookup import Wanted
from paged_kv.store.write_queue import Faults
from paged_kv.tiers.blobs import MOST_ENTRY_BYTES, Blobs, round_trips
from paged_kv.tiers.remote_writer import RemoteWriter
from paged_kv.tiers.seal import HEADER_BYTES, Seal
from paged_kv.tiers.waits import Patience, Pause, Waits

# What one round trip brings, if no entry is larger. At 0.2 s each, those on the way bring 240 MB/s;
# on loopback they keep as many threads busy with verifying.
BATCH_BYTES = 16 << 20
MOST_IN_BATCH = 1024
# Round trips on the way behind the one whose entries are used.
_BATCHES_AHEAD = 2

Sized = tuple[EntryPlace, int]
"""An entry's place, and the bytes that its server has said to hold."""


class RemoteRead:
    """Entries of a server, in the order in which they are used.

    Args:
        wanted: the entries.
        begin: begins one round trip; returns a future for each of its entries, or None during a
            pause.
    """

    def __init__(
        self,
        wanted: Iterable[Sized],
        begin: Callable[[Sequence[Sized]], Sequence[Future[Entry] | None]],
    ) -> None:
        self._batches = round_trips(wanted, itemgetter(1), BATCH_BYTES, MOST_IN_BATCH)
        self._batch_of = {place: at for at, batch in enumerate(self._batches) for place, _ in batch}
        self._begin = begin
        self._num_begun = 0
        self._begun: dict[EntryPlace, Future[Entry] | None] = {}

    def start(self, place: EntryPlace) -> Future[Entry] | None:
        """The read of an entry, which begins now if it has not before; None during a pause."""
        until = self._batch_of[place] + 1 + _BATCHES_AHEAD
        for batch in self._batches[self._num_begun : until]:
            places = [place for place, _ in batch]
            self._begun.update(zip(places, self._begin(batch), strict=True))
            self._num_begun += 1
        return self._begun.pop(place)


PATIENCE_S = 0.5
_SLOWEST_BYTES_A_SECOND = 20 << 20
# Two threads saturate Redis on loopback; more hide the latency of servers far away.
_READERS = 4
QUEUE_BYTES = 256 << 20
# Of a prompt of 262,144 tokens with two groups of layers and states.
_MOST_ASKED = 4096

Result = TypeVar("Result")


class RemoteTier:
    """Entries on a server. No method raises because of it.

    Args:
        label: names the tier in statistics.
        name: names it in logs, without passwords.
        blobs: the server; `close` closes it.
        seal: makes and verifies entries.
        patience_s: seconds that a prompt waits for its question, and for its entries besides what
            they take at 20 MB/s.

    Attributes:
        label: as given.
        queue: what waits to be written.
        faults: counts what went wrong.
    """

    def __init__(
        self,
        label: str,
        name: str,
        blobs: Blobs,
        seal: Seal,
        *,
        queue_bytes: int = QUEUE_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.label = label
        self._counts: Counter[str] = Counter()
        self.faults = Faults(name)
        self.queue = RemoteWriter(blobs, seal, self.faults, queue_bytes)
        self._blobs = blobs
        self._seal = seal
        self._patience_s = patience_s
        self._pause = Pause()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="paged-kv-read")
        parts = self.queue, self._readers, blobs
        self._close = weakref.finalize(self, _close, *parts)

    @property
    def is_paused(self) -> bool:
        """Whether it is left alone, as it has failed a moment ago."""
        return self._pause.is_on

    def close(self) -> None:
        """Write the queued entries and close the connections. Later calls do nothing."""
        self._close()

    def ask(self, wanted: Wanted, waits: Waits) -> dict[str, int]:
        """The bytes of what the server holds for a prompt, by key, in one question."""
        places = list(islice(wanted.places(), _MOST_ASKED))
        names = [self._seal.name(place.key) for place in places]
        patience = waits.asking(self, self._patience_s)
        sizes = self._wait(self._submit(self._blobs.sizes, names), patience)
        found = {}
        for place, nbytes in zip(places, sizes or (), strict=False):
            is_there = HEADER_BYTES < nbytes <= MOST_ENTRY_BYTES
            self.queue.note(place.key, is_there=is_there)
            if is_there:
                found[place.key] = nbytes
            elif nbytes:
                self.faults.note(WrongSize(f"an entry has {nbytes:,} bytes"))
        return found

    def read(self, wanted: Iterable[Sized], waits: Waits) -> RemoteRead:
        """A read of entries for a prompt, which begins when the first of them is started."""
        return RemoteRead(wanted, partial(self._begin, self._reading_patience(waits)))

    def finish(
        self, reading: Future[Entry] | None, place: EntryPlace, waits: Waits
    ) -> Entry | None:
        """The entry that a `RemoteRead` has started; None if it cannot be had."""
        entry = self._wait(reading, self._reading_patience(waits))
        if entry is None:
            self.queue.note(place.key, is_there=False)
        else:
            self._counts["entries_read"] += 1
            self._counts["bytes_read"] += entry.nbytes
        return entry

    def stats(self) -> StoreStats:
        """The counts so far."""
        return stats_of(self._counts + self.queue.counts, self.queue.written, self.faults)

    def _reading_patience(self, waits: Waits) -> Patience:
        return waits.reading(self, self._patience_s)

    def _begin(self, patience: Patience, batch: Sequence[Sized]) -> Sequence[Future[Entry] | None]:
        """Begin one round trip; None for each of its entries during a pause."""
        futures: list[Future[Entry]] = [Future() for _ in batch]
        if self._submit(self._get, batch, futures) is None:
            return [None] * len(batch)
        for place, nbytes in batch:
            patience.allow(place.key, nbytes / _SLOWEST_BYTES_A_SECOND)
        return futures

    def _get(self, batch: Sequence[Sized], futures: Sequence[Future[Entry]]) -> None:
        """Runs on a reader thread, and lets every future know."""
        names = [self._seal.name(place.key) for place, _ in batch]
        sizes = [nbytes for _, nbytes in batch]
        try:
            found = self._blobs.get(list(zip(names, sizes, strict=True)))
        except Exception as error:  # clients raise what they like, and `_wait` counts it
            for future in futures:
                _settle(future, error)
            return
        for (place, _), name, data, future in zip(batch, names, found, futures, strict=True):
            try:
                _settle(future, self._opened(place, name, data))
            except Exception as error:
                _settle(future, error)

    def _opened(self, place: EntryPlace, name: str, data: Buffer) -> Entry:
        entry = decode(self._seal.opened(name, data), place.key)
        if entry.place != place:
            raise OtherEntry("it holds other tokens, or pages of another model")
        return entry

    def _submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result] | None:
        if self._pause.is_on or not self._close.alive:
            return None
        try:
            return self._readers.submit(work, *arguments)
        except RuntimeError:
            return None  # the interpreter is exiting

    def _wait(self, future: Future[Result] | None, patience: Patience) -> Result | None:
        if future is None:
            return None
        if not patience.wait(future):
            self.faults.note(TimeoutError("no answer in the time that a prompt waits"))
            self._pause.note_failure()
            future.cancel()
            self._blobs.interrupt()
            return None
        try:
            result = future.result()
        except InvalidEntry as error:
            self.faults.note(error)
            return None
        except Exception as error:  # clients raise what they like: every failure is a miss
            self.faults.note(error)
            self._pause.note_failure()
            return None
        self._pause.note_success()
        return result


class WrongSize(InvalidEntry):
    """An entry that claims more bytes than any page has, or fewer than its header."""

    kind = "wrong size"


def _settle(future: Future[Entry], outcome: Entry | Exception) -> None:
    """Give a future its outcome, unless nobody waits for it any more."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _close(writer: RemoteWriter, readers: ThreadPoolExecutor, blobs: Blobs) -> None:
    writer.close()
    readers.shutdown(wait=False, cancel_futures=True)
    blobs.close()
