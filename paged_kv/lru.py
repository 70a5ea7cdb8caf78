"""A dict that keeps the entries that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LRU(MutableMapping[Key, Value]):
    """Beyond a limit the least recently used entries go. One thread uses it at a time.

    Setting an entry uses it, and so does `use`; reading does not. It iterates from the least
    recently used entry on. The latest one stays, however large it is.

    Args:
        most: the limit of the sum of all sizes.
        size_of: tells the size of an entry, which must not change; without it each counts 1.

    Attributes:
        most: as given. A change holds when the next entry is set.
    """

    def __init__(
        self,
        most: int,
        size_of: Callable[[Key, Value], int] = lambda key, value: 1,
    ) -> None:
        self.most = most
        self._size_of = size_of
        self._size = 0
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def __getitem__(self, key: Key) -> Value:
        return self._entries[key]

    def __setitem__(self, key: Key, value: Value) -> None:
        self.put(key, value)

    def __delitem__(self, key: Key) -> None:
        self._size -= self._size_of(key, self._entries.pop(key))

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: Key, value: Value) -> list[tuple[Key, Value]]:
        """Set an entry; returns those that went for it."""
        if key in self:
            self._size -= self._size_of(key, self[key])
        self._entries[key] = value
        self._entries.move_to_end(key)
        self._size += self._size_of(key, value)
        dropped = []
        while self._size > self.most and len(self) > 1:
            dropped.append(self.popitem())
        return dropped

    def use(self, key: Key) -> Value | None:
        """The value of a key, which is now the latest; None if it is not there."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)
