"""Writes entries to a server behind the back of whoever made them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from paged_kv.store.entry_file import Entry, encode
from paged_kv.store.limits import Written
from paged_kv.store.write_queue import Faults, Writer
from paged_kv.tiers.blobs import Blobs, RemoteFault
from paged_kv.tiers.seal import Seal
from paged_kv.tiers.waits import Pause

SLOW = "the server is slower than what it is given"
PAUSED = "the server has failed a moment ago"
FULL = "the server is full"
# Keys that are known to be there: 64 MB of memory at most.
_MOST_KNOWN = 1 << 18


class RemoteWriter(Writer[Entry]):
    """Entries on their way to a server. What does not fit, and what comes during a pause, is
    dropped and counted.

    Attributes:
        written: the bytes sent today and in all, by this process.
    """

    late = "the server did not take them before the end"
    patience_s = 10.0

    def __init__(self, blobs: Blobs, seal: Seal, faults: Faults, max_bytes: int) -> None:
        super().__init__("paged-kv-remote", max_bytes, faults)
        self.written = Written()
        self._blobs = blobs
        self._seal = seal
        self._pause = Pause()
        self._known: OrderedDict[str, None] = OrderedDict()

    def knows(self, key: str) -> bool:
        """Whether an entry is on the server or queued, as far as this process has seen."""
        return key in self._known

    def note(self, key: str, *, is_there: bool) -> None:
        """Note whether an entry is on the server."""
        with self._changed:
            self._known.pop(key, None)
            if is_there:
                self._known[key] = None
                if len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)

    def has_room(self, nbytes: int) -> bool:
        """Whether the queue takes `nbytes` now; if not, this counts a drop."""
        if self._pause.is_on or not self.fits(nbytes):
            self._faults.drop(PAUSED if self._pause.is_on else SLOW)
            return False
        return True

    def save(self, entry: Entry, path: Sequence[str] = ()) -> None:
        """Queue an entry; the server decides what it evicts, whatever the `path`."""
        with self._changed:
            if self._add(entry):
                self.note(entry.place.key, is_there=True)

    def write(self, jobs: Sequence[Entry]) -> None:
        """Send entries. One that fails is lost, and the next ones still go out."""
        for entry in jobs:
            try:
                self._write(entry)
            except Exception as error:
                self._faults.note(error)
                self.note(entry.place.key, is_there=False)
                self._faults.drop(FULL if getattr(error, "is_full", False) else "the write failed")
                self._pause.note_failure()

    def _write(self, entry: Entry) -> None:
        if self._pause.is_on:
            self.note(entry.place.key, is_there=False)
            self._faults.drop(PAUSED)
            return
        name = self._seal.name(entry.place.key)
        data = self._seal.sealed(name, encode(entry))
        try:
            self._blobs.put(name, data)
        except RemoteFault:
            raise
        except MemoryError as error:
            raise RemoteFault(error) from None
        self._pause.note_success()
        self.counts["entries_written"] += 1
        self.counts["bytes_written"] += entry.nbytes
        self.written = self.written.plus(sum(map(len, data)))
