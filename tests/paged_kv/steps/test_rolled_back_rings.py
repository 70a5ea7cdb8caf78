"""Rings hold what a window sees, and after a rollback remember which tokens they have
overwritten."""

from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.pool.layer_kinds import Window
from tests.support.arrays import normal
from tests.support.ring_batches import PAGE_BYTES, append, new_batch


@pytest.mark.parametrize("window", [Window(300, 100), Window(256, 256), Window(20, 20)])
def test_what_is_read_is_what_the_first_query_of_a_step_sees(window: Window) -> None:
    """Attention without the window must not get more tokens."""
    batch = new_batch(PagePool(2, windows={1: window}, max_bytes=100 * PAGE_BYTES))
    for count in (10, 600, 1, 3, 20, 1):
        assert append(batch, count)
        tokens = len(batch.rows[0].tokens)
        seen = [cache.keys_and_values()[0].shape[2] for cache in batch.layers]
        assert seen == [tokens, min(tokens, window.size - 1 + count)]


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
