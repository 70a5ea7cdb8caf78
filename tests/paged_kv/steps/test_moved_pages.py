"""Attention to an earlier read follows its pages when they are converted and move."""

from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.kernels.pages.page_format import page_format_named
from tests.support.arrays import normal

pytestmark = pytest.mark.usefixtures("backend")

SHAPE = (1, 1, 1000, 32)


@pytest.mark.parametrize("queries", [1, 5])
def test_attention_follows_pages_that_were_converted_since(queries: int) -> None:
    pool = PagePool(1, max_bytes=32 << 20)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    given = normal(SHAPE, mx.float32, 1), normal(SHAPE, mx.float32, 2)
    cache.update_and_fetch(*given)
    keys, values = cache.keys_and_values()
    cache.batch.convert(page_format_named("q8"))
    # Another sequence takes the pages that were freed.
    other = PagedKVCache(pool, 0, [Sequence(pool)])
    other.update_and_fetch(mx.zeros(SHAPE), mx.zeros(SHAPE))
    asked = normal((1, 2, queries, 32), mx.float32, 3)
    mask: Any = None if queries == 1 else "causal"
    found = paged_attention(asked, keys, values, cache, 0.2, mask)
    expected = mx.fast.scaled_dot_product_attention(asked, *given, scale=0.2, mask=mask)
    assert mx.allclose(found, expected, atol=5e-3)


def test_attention_follows_pages_that_were_recoded_since() -> None:
    """As when another sequence's step makes the pool requantise them."""
    pool = PagePool(1, max_bytes=32 << 20)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    given = normal(SHAPE, mx.float32, 1), normal(SHAPE, mx.float32, 2)
    cache.update_and_fetch(*given)
    keys, values = cache.keys_and_values()
    (group,), (table,) = pool.groups, cache.sequences[0].tables.values()
    group.add_formats(page_format_named("q8"))
    group.recode(
        lambda: table.full_blocks(SHAPE[2]),
        "q8",
        lambda count: group.allocator.ensure_free({"q8": count}),
    )
    other = PagedKVCache(pool, 0, [Sequence(pool)])
    other.update_and_fetch(mx.zeros(SHAPE), mx.zeros(SHAPE))
    asked = normal((1, 2, 1, 32), mx.float32, 3)
    found = paged_attention(asked, keys, values, cache, 0.2, None)
    expected = mx.fast.scaled_dot_product_attention(asked, *given, scale=0.2)
    assert mx.allclose(found, expected, atol=5e-3)
