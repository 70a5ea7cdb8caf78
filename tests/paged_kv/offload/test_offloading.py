"""Which pages go out of memory, and what a pool does whose disk fails."""

import errno
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagePool, PoolExhausted, Sequence
from paged_kv.allocator.requantisation import FullBlock
from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.offload.offloading import RECENT_PAGES, OldestOffloaded
from tests.support.arrays import normal


def test_the_oldest_pages_go_first_and_the_first_and_latest_stay() -> None:
    blocks = [
        FullBlock(at, "q4" if at % 2 else "fp16", is_first=at == 0, age=9 - at) for at in range(10)
    ]
    blocks.append(FullBlock(10, "q8", is_first=False, age=99))
    (*found,) = OldestOffloaded("q4").requantisations(blocks[::-1], 1.0)
    assert [each.block for each in found] == list(range(1, 10 - RECENT_PAGES))
    assert {each.page_format for each in found} == {"offloaded"}


def test_pages_that_do_not_all_fit_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are reserved one by one, so that the first may go out of memory for the last."""
    pool = PagePool(1, max_bytes=12 << 17, read_tokens=768, offload=tmp_path)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    kv = normal((1, 2, 1500, 64), mx.float16, 1)
    cache.update_and_fetch(kv, kv)
    group = pool.groups[0]
    used = pool.stats().blocks_used
    table = group.allocator.new_table()

    def fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(PoolExhausted, match="No space left on device"):
        pool.append_blocks(group, table, ["fp16"] * 12)
    assert not table.blocks
    assert pool.stats().blocks_used == used
    pool.check()
