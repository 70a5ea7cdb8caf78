"""Writes entries to a server behind the back of whoever made them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from paged_kv.store.entry_file import Entry, encode
from paged_kv.store.ledger import Written
from paged_kv.store.write_queue import Faults
from paged_kv.tiers.blobs import Blobs, RemoteFault
from paged_kv.tiers.seal import Seal
from paged_kv.tiers.waits import Pause

SLOW = "the server is slower than what it is given"
PAUSED = "the server has failed a moment ago"
FULL = "the server is full"
# At the end of the process entries that are still queued after this time are lost.
CLOSE_PATIENCE_S = 10.0
# Keys that are known to be there: 64 MB of memory at most.
_MOST_KNOWN = 1 << 18


class RemoteWriter:
    """A bounded queue of entries, and the thread that writes them. What does not fit, and what
    comes during a pause, is dropped and counted.

    Attributes:
        counts: "entries_written" and "bytes_written".
        written: the bytes sent today and in all, by this process.
    """

    def __init__(self, blobs: Blobs, seal: Seal, faults: Faults, max_bytes: int) -> None:
        self.counts: Counter[str] = Counter()
        self.written = Written()
        self._blobs = blobs
        self._seal = seal
        self._faults = faults
        self._max_bytes = max_bytes
        self._pause = Pause()
        self._entries: deque[Entry] = deque()
        self._queued_bytes = 0
        self._is_writing = self._is_closing = False
        self._changed = threading.Condition()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._thread = threading.Thread(target=self._run, name="paged-kv-remote", daemon=True)
        self._thread.start()

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
        fits = not self._queued_bytes or self._queued_bytes + nbytes <= self._max_bytes
        if self._pause.is_on or not fits:
            self._faults.drop(PAUSED if self._pause.is_on else SLOW)
            return False
        return True

    def save(self, entry: Entry, path: Sequence[str] = ()) -> None:
        """Queue an entry; the server decides what it evicts, whatever the `path`."""
        with self._changed:
            if self._is_closing:
                return
            self._entries.append(entry)
            self._queued_bytes += entry.nbytes
            self._changed.notify_all()
        self.note(entry.place.key, is_there=True)

    def flush(self, seconds: float = CLOSE_PATIENCE_S) -> bool:
        """Wait until the queue is empty; false if that takes longer."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._entries and not self._is_writing, seconds
            )

    def close(self) -> None:
        """Write the queued entries and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_PATIENCE_S)
        with self._changed:
            lost = len(self._entries)
            self._entries.clear()
        if lost:
            self._faults.drop("the server did not take them before the end", lost)

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            try:
                self._write(entry)
            except Exception as error:  # an entry is lost then, and the next ones still go out
                self._faults.note(error)
                self.note(entry.place.key, is_there=False)
                self._faults.drop(FULL if getattr(error, "is_full", False) else "the write failed")
                self._pause.note_failure()
            finally:
                with self._changed:
                    self._queued_bytes -= entry.nbytes
                    self._is_writing = False
                    self._changed.notify_all()

    def _next(self) -> Entry | None:
        """Wait for the next entry; None ends the thread."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._entries) or self._is_closing)
            self._is_writing = bool(self._entries)
            return self._entries.popleft() if self._entries else None

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
