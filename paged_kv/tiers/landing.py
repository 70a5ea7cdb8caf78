"""Entries that were read from servers before the prompt that needs them begins."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future

from paged_kv.store.entry_file import Entry
from paged_kv.store.keys import EntryPlace
from paged_kv.store.lookup import Wanted

LANDING_BYTES = 1 << 30


class Landing:
    """The quickest tier: entries in memory, each until it is read. Threads may share it.

    Args:
        max_bytes: the most that they may take; the earliest go first.

    Attributes:
        label: the tier that the latest entries came from.
    """

    def __init__(self, max_bytes: int = LANDING_BYTES) -> None:
        self.label = ""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def put(self, entry: Entry, label: str) -> None:
        """Keep an entry that was read from a tier."""
        with self._lock:
            self.label = label
            self._pop(entry.place.key)
            self._entries[entry.place.key] = entry
            self._nbytes += entry.nbytes
            while self._nbytes > self._max_bytes:
                self._pop(next(iter(self._entries)))

    def discard(self, keys: Iterable[str]) -> None:
        """Forget entries, if they are there."""
        with self._lock:
            for key in keys:
                self._pop(key)

    def ask(self, wanted: Wanted, waits: object = None) -> dict[str, int]:
        """The bytes of what is there, by key."""
        with self._lock:
            return {key: entry.nbytes for key, entry in self._entries.items()}

    def start(self, place: EntryPlace) -> Future[Entry]:
        """Take an entry out; `Entry | None` is known at once."""
        taken: Future[Entry] = Future()
        with self._lock:
            entry = self._pop(place.key)
        if entry is None:
            taken.set_exception(KeyError(place.key))
        else:
            taken.set_result(entry)
        return taken

    def finish(self, taken: Future[Entry] | None, place: EntryPlace, waits: object) -> Entry | None:
        """The entry that `start` has taken out; None if it had gone."""
        return None if taken is None or taken.exception() else taken.result()

    def _pop(self, key: str) -> Entry | None:
        entry = self._entries.pop(key, None)
        self._nbytes -= 0 if entry is None else entry.nbytes
        return entry
