"""Lists objects in use, through weak references, and notifies listeners of new ones."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Registry(Generic[Item]):
    """Items that are still referenced elsewhere. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._items: weakref.WeakSet[Item] = weakref.WeakSet()
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def add(self, item: Item) -> None:
        """Add an item and call the listeners."""
        with self._lock:
            self._items.add(item)
            for listener in self._listeners:
                listener()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call the listener for each new item, and at once if there is an item already."""
        with self._lock:
            self._listeners.append(listener)
            if self._items:
                listener()

    def items(self) -> list[Item]:
        """All items, in no order."""
        with self._lock:
            return list(self._items)
