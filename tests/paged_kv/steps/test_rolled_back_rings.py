"""Rings hold what a window sees, and after a rollback remember which tokens they have
overwritten."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.pool.window import Window
from tests.support.arrays import normal
from tests.support.ring_batches import PAGE_BYTES, append, assert_holds, new_batch


@pytest.mark.parametrize("window", [Window(300, 100), Window(256, 256), Window(20, 20)])
@pytest.mark.parametrize("written", [600, 1200])
@pytest.mark.parametrize("back", [1, 99])
def test_what_was_written_over_cannot_be_taken_back(
    window: Window, written: int, back: int
) -> None:
    pool = PagePool(2, windows={1: window}, max_bytes=100 * PAGE_BYTES)
    batch = new_batch(pool)
    (row,) = batch.rows
    assert append(batch, written)
    for count in (back, 1, 1):
        count = min(count, row.rollback([window]))
        assert {cache.trim(count) for cache in batch.layers} == {count}
        row.trim(count)
        assert append(batch, 1)
        possible = row.rollback([window])
        assert [cache.can_trim(possible) for cache in batch.layers] == [True, True]
        assert not any(cache.can_trim(possible + 1) for cache in batch.layers)
    for cache in batch.layers:
        cache.trim(possible)
    row.trim(possible)
    for cache in batch.layers:
        assert_holds(cache, batch.rows)
    assert append(batch, 350)


@pytest.mark.parametrize("window", [Window(300, 100), Window(256, 256), Window(20, 20)])
def test_what_is_read_is_what_the_first_query_of_a_step_sees(window: Window) -> None:
    """Attention without the window must not get more tokens."""
    batch = new_batch(PagePool(2, windows={1: window}, max_bytes=100 * PAGE_BYTES))
    for count in (10, 600, 1, 3, 20, 1):
        assert append(batch, count)
        tokens = len(batch.rows[0].tokens)
        seen = [cache.keys_and_values()[0].shape[2] for cache in batch.layers]
        assert seen == [tokens, min(tokens, window.size - 1 + count)]


@pytest.mark.parametrize("queries", [1, 10])
def test_a_causal_mask_hides_no_more_than_it_says(queries: int) -> None:
    """A model that passes a mask means all keys that it was given, also in a layer with a
    window."""
    pool = PagePool(1, windows={0: Window(20, 20)}, max_bytes=100 * PAGE_BYTES)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    cache.update_and_fetch(
        normal((1, 1, 40, 8), mx.float32, 1), normal((1, 1, 40, 8), mx.float32, 2)
    )
    step = [normal((1, 1, queries, 8), mx.float32, seed) for seed in (3, 4)]
    keys, values = cache.update_and_fetch(*step)
    asked = normal((1, 2, queries, 8), mx.float32, 5)
    found = paged_attention(asked, keys, values, cache, 1.0, "causal")
    gathered = mx.array(np.asarray(keys)), mx.array(np.asarray(values))
    expected = mx.fast.scaled_dot_product_attention(asked, *gathered, scale=1.0, mask="causal")
    assert mx.allclose(found, expected, atol=1e-5)


def test_a_write_to_a_ring_that_fails_counts_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have overwritten tokens before it failed."""
    pool = PagePool(1, windows={0: Window(20, 20)}, max_bytes=100 * PAGE_BYTES)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    token = normal((1, 1, 1, 8), mx.float32, 3)
    for count in (600, 1):
        prompt = normal((1, 1, count, 8), mx.float32, 1)
        cache.update_and_fetch(prompt, prompt)
    possible = cache.sequences[0].rollback
    write_later = LayerPages.write_later

    def failing(*arguments: Any) -> None:
        write_later(*arguments)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(LayerPages, "write_later", failing)
        with pytest.raises(MemoryError):
            cache.update_and_fetch(token, token)
    assert cache.sequences[0].rollback == possible - 1
    cache.update_and_fetch(token, token)
    assert cache.sequences[0].rollback == possible
