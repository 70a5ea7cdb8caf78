"""A mask one token wider than a layer's window: plamo3 makes such masks."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.pool.layer_kinds import Window

HEADS, DIM, SCALE, WINDOW = 2, 32, 0.25, 8


def step(seed: int, tokens: int, batch: int) -> mx.array:
    return mx.random.normal((3, batch, HEADS, tokens, DIM), key=mx.random.key(seed))


def outputs(cache: Any, steps: list[int], wider: int, batch: int = 1) -> list[mx.array]:
    """Attention at each step, with a mask that is so much wider than the window."""
    results = []
    for seed, tokens in enumerate(steps):
        queries, keys, values = step(seed, tokens, batch)
        mask = cache.make_mask(tokens, window_size=WINDOW + wider)
        keys, values = cache.update_and_fetch(keys, values)
        results.append(paged_attention(queries, keys, values, cache, SCALE, mask))
    return results


def paged_cache(chunk: int) -> PagedKVCache:
    pool = PagePool(1, windows={0: Window(WINDOW, chunk)}, max_bytes=8 << 20)
    return PagedKVCache(pool, 0, [Sequence(pool)])


# Steps that end below, at, one above and far above the window; those longer than the chunk are
# attended to before they are written.
@pytest.mark.parametrize("steps", [[1, 8, 1], [9, 2, 1], [3, 6, 5, 1], [300, 2, 7, 1, 20]])
@pytest.mark.parametrize("chunk", [1, 8])
def test_one_more_token_is_read_from_pages(backend: str, steps: list[int], chunk: int) -> None:
    cache = paged_cache(chunk)
    found = outputs(cache, steps, 1)
    expected = outputs(RotatingKVCache(max_size=WINDOW), steps, 1)
    for ours, theirs in zip(found, expected, strict=True):
        assert mx.abs(ours - theirs).max() < 1e-5
    cache.trim(1)  # drops what the last step returned
    assert cache.pool.stats().gather_fallbacks == 0
