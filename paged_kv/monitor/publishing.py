"""Publishes the pools of this process, from `publisher.start()` on."""

from __future__ import annotations

from paged_kv.monitor.pool_views import view_process
from paged_kv.monitor.publisher import Publisher
from paged_kv.pool.page_pool import open_pools

publisher = Publisher(lambda: view_process(open_pools.items()))
