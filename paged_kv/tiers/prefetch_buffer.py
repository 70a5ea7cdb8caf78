"""Entries that were read from servers before the prompt that needs them begins."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from paged_kv.store.entry_file import Entry
from paged_kv.store.lookup import Wanted
from paged_kv.tiers.tier import Sized
from paged_kv.tiers.waits import Waits

_MOST_BYTES = 1 << 30


class PrefetchBuffer:
    """The quickest `Source`: entries in memory, each until it is read. Threads may share it.

    Args:
        max_bytes: the most that they may take; the earliest go first.

    Attributes:
        label: the tier that the latest entries came from.
    """

    def __init__(self, max_bytes: int = _MOST_BYTES) -> None:
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

    def ask(self, wanted: Wanted, waits: Waits) -> Mapping[str, int]:
        with self._lock:
            return {key: entry.nbytes for key, entry in self._entries.items()}

    def read(self, wanted: Sequence[Sized], waits: Waits) -> Iterator[Entry | None]:
        for place, _ in wanted:
            with self._lock:
                entry = self._pop(place.key)
            yield entry

    def _pop(self, key: str) -> Entry | None:
        entry = self._entries.pop(key, None)
        self._nbytes -= 0 if entry is None else entry.nbytes
        return entry
