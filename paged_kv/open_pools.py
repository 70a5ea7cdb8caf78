"""The pools that are in use: loaded prompt caches look here for one to live in."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_kv.page_pool import PagePool
    from paged_kv.window import Window

open_pools: weakref.WeakSet[PagePool] = weakref.WeakSet()


def find_pool(num_layers: int, page_format: str, windows: Mapping[int, Window]) -> PagePool | None:
    """The latest pool still in use that has these layers and that format."""
    wanted = num_layers, page_format, windows
    fitting = [
        pool
        for pool in open_pools
        if (pool.num_layers, pool.page_format.name, pool.windows) == wanted
    ]
    return max(fitting, key=lambda pool: pool.serial, default=None)
