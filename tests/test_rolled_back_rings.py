"""Rings hold what a window sees, and still know what they have written over when they were rolled
back."""

import pytest

from paged_kv import PagePool
from paged_kv.window import Window
from tests.ring_batches import PAGE_BYTES, append, assert_holds, new_batch


@pytest.mark.parametrize("window", [Window(300, 100), Window(256, 256), Window(20, 20)])
@pytest.mark.parametrize("written", [600, 1200])
@pytest.mark.parametrize("back", [1, 19, 99])
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
    """Attention that does not know the window must not be given more."""
    batch = new_batch(PagePool(2, windows={1: window}, max_bytes=100 * PAGE_BYTES))
    for count in (10, 600, 1, 3, 20, 1):
        assert append(batch, count)
        tokens = len(batch.rows[0].tokens)
        seen = [cache.keys_and_values()[0].shape[2] for cache in batch.layers]
        assert seen == [tokens, min(tokens, window.size - 1 + count)]
