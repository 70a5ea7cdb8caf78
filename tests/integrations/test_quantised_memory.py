"""Reading quantised pages makes no 16-bit copy of them."""

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.integrations.attention_hook import paged_attention
from tests.support.backends import instruction_sets

TOKENS, HEADS, DIM = 32 * 1024, 2, 64
SIXTEEN_BIT_BYTES = 2 * TOKENS * HEADS * DIM * 2


def attend(cache: PagedKVCache, queries: mx.array, step: mx.array) -> None:
    """A step of a model that drops the gathered arrays at once: otherwise MLX would compute
    them."""
    keys, values = cache.update_and_fetch(step, step)
    mask = None if queries.shape[2] == 1 else "causal"
    mx.eval(paged_attention(queries, keys, values, cache, 0.125, mask))


@pytest.mark.skipif(not instruction_sets(), reason="the plain backend may copy what it reads")
@pytest.mark.parametrize("page_format", ["q8", "q4"])
@pytest.mark.parametrize("queries", [1, 128])
def test_attention_to_32k_tokens_takes_no_memory_of_their_size(
    page_format: str, queries: int
) -> None:
    pool = PagePool(1, page_format=page_format, max_bytes=SIXTEEN_BIT_BYTES)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    for _ in range(0, TOKENS, 4096):
        step = mx.random.normal((1, HEADS, 4096, DIM)).astype(mx.float16)
        attend(cache, step[:, :, :1], step)
    asked = mx.random.normal((1, 4 * HEADS, queries, DIM)).astype(mx.float16)
    new = mx.random.normal((1, HEADS, queries, DIM)).astype(mx.float16)
    mx.eval(asked, new)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    attend(cache, asked, new)
    # The step may have needed another slab.
    stats = pool.stats()
    slab_bytes = max(pool.groups[0].allocator.slabs.values()) * stats.bytes_active
    most = slab_bytes // stats.blocks_used + SIXTEEN_BIT_BYTES // 16
    assert mx.get_peak_memory() - before < most
