"""The pools that are in use: loaded prompt caches look here for one to live in, and other processes
are shown what these hold."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paged_kv.process_view import view_process
from paged_kv.publisher import Publisher

if TYPE_CHECKING:
    from paged_kv.page_pool import PagePool
    from paged_kv.window import Window

_pools: weakref.WeakSet[PagePool] = weakref.WeakSet()
_lock = threading.Lock()
_publisher = Publisher(lambda: view_process(open_pools()))


def note_open(pool: PagePool) -> None:
    """A pool was made."""
    with _lock:
        _pools.add(pool)
        _publisher.start()


def open_pools() -> list[PagePool]:
    """The pools that somebody still refers to."""
    with _lock:
        return list(_pools)


def find_pool(num_layers: int, page_format: str, windows: Mapping[int, Window]) -> PagePool | None:
    """The latest pool still in use that has these layers and that format."""
    wanted = num_layers, page_format, windows
    fitting = [
        pool
        for pool in open_pools()
        if (pool.num_layers, pool.page_format.name, pool.windows) == wanted
    ]
    return max(fitting, key=lambda pool: pool.serial, default=None)
