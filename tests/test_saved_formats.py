"""A cache that was saved goes on in the format that it had."""

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.page_transfer import page_formats
from tests.ring_batches import materialised


@pytest.mark.parametrize("bits", [4, 8])
def test_tokens_to_come_get_pages_like_those_before(bits: int) -> None:
    pool = PagePool(1, max_bytes=1 << 24)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    step = mx.ones((1, 1, 300, 32))
    cache.update_and_fetch(step, step)
    cache.to_quantized(bits=bits)
    loaded = PagedKVCache.from_state(materialised(cache.state))
    loaded.update_and_fetch(step, step)
    assert page_formats(loaded.pool, 0, loaded.sequences[0]) == [f"q{bits}"] * 3
