"""Reads entries in order, with several reads on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

READ_AHEAD = 8

Item = TypeVar("Item")
Reading = TypeVar("Reading")
Result = TypeVar("Result")


def read_ahead(
    items: Iterable[Item],
    start: Callable[[Item], Reading],
    finish: Callable[[Reading, Item], Result | None],
) -> Iterator[Result | None]:
    """What `finish` returns for each item, in order. It is called when its turn comes; `start` is
    called earlier. Yields None for an item that cannot be read, and ends."""
    coming = iter(items)
    started = deque((item, start(item)) for item in islice(coming, READ_AHEAD))
    while started:
        item, reading = started.popleft()
        result = finish(reading, item)
        yield result
        if result is None:
            return
        started.extend((item, start(item)) for item in islice(coming, 1))
