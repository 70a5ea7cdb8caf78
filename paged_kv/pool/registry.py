"""Lists objects in use, through weak references."""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

from paged_kv.listeners import new_item_listeners

Item = TypeVar("Item")


class Registry(Generic[Item]):
    """Items that are still referenced elsewhere. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._items: weakref.WeakSet[Item] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, item: Item) -> None:
        """Add an item and call the listeners."""
        with self._lock:
            self._items.add(item)
            for listener in new_item_listeners:
                listener()

    def items(self) -> list[Item]:
        """All items, in no order."""
        with self._lock:
            return list(self._items)
