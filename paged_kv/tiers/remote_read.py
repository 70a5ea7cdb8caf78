"""Reads entries of a server for one prompt, many in each round trip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from paged_kv.store.entry_file import Entry
from paged_kv.store.keys import Place

# What one round trip brings, if no entry is larger. At 0.2 s each, those on the way bring 240 MB/s;
# on loopback they keep as many threads busy with verifying.
BATCH_BYTES = 16 << 20
MOST_IN_BATCH = 1024
# Round trips on the way behind the one whose entries are used.
_BATCHES_AHEAD = 2

Sized = tuple[Place, int]
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
        self._batches = batches(wanted)
        self._batch_of = {place: at for at, batch in enumerate(self._batches) for place, _ in batch}
        self._begin = begin
        self._num_begun = 0
        self._begun: dict[Place, Future[Entry] | None] = {}

    def start(self, place: Place) -> Future[Entry] | None:
        """The read of an entry, which begins now if it has not before; None during a pause."""
        until = self._batch_of[place] + 1 + _BATCHES_AHEAD
        for batch in self._batches[self._num_begun : until]:
            places = [place for place, _ in batch]
            self._begun.update(zip(places, self._begin(batch), strict=True))
            self._num_begun += 1
        return self._begun.pop(place)


def batches(wanted: Iterable[Sized]) -> list[list[Sized]]:
    """Entries by round trip, in order."""
    found: list[list[Sized]] = []
    nbytes = 0
    for each in wanted:
        nbytes += each[1]
        if not found or nbytes > BATCH_BYTES or len(found[-1]) == MOST_IN_BATCH:
            found.append([])
            nbytes = each[1]
        found[-1].append(each)
    return found
