"""A step that one layer refuses has no effect on any layer."""

import contextlib
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv import PagePool
from paged_kv.pool.window import Window
from tests.support.examples import examples
from tests.support.layer_caches import ragged_step
from tests.support.ring_batches import (
    DIM,
    PAGE_BYTES,
    Batch,
    append,
    assert_holds,
    fresh_tokens,
    new_batch,
    write,
)

LAYERS = 3
# The layer in the middle sees everything.
WINDOWS = {0: Window(300, 100), 2: Window(20, 20)}
LONGEST_WRITE = 100
COUNTS = st.sampled_from([1, 3, 20, 100, 256, 700, 1500])


def refused_step(batch: Batch, count: int, refusing: int, lengths: list[int] | None) -> None:
    """All layers before one take a step, and that one gets heads of another size."""
    steps = fresh_tokens(count, len(batch.rows))
    with contextlib.nullcontext() if lengths is None else ragged_step(batch.layers, lengths):
        before = progress(batch)
        for cache in batch.layers[:refusing]:
            write(cache, [row.tokens for row in batch.rows], steps, lengths)
        wrong = mx.zeros((len(batch.rows), 1, count, DIM + 8))
        with pytest.raises(ValueError, match=f"layer {refusing} expects"):
            batch.layers[refusing].update_and_fetch(wrong, wrong)
        assert progress(batch) == before


def progress(batch: Batch) -> list[Any]:
    """The state that later steps depend on."""
    sequences = batch.layers[0].sequences
    found = [each.progress(layer) for each in sequences for layer in range(LAYERS)]
    return [(each.tokens, each.padding) for each in found]


def assert_rows_are_held(batch: Batch) -> None:
    for cache in batch.layers:
        assert_holds(cache, batch.rows)


@pytest.mark.slow
@examples(25)
@given(
    steps=st.lists(COUNTS, min_size=1, max_size=4),
    count=COUNTS,
    refusing=st.integers(1, LAYERS - 1),
    lengths=st.none() | st.tuples(st.integers(1, 300), st.integers(1, 300)),
    more=COUNTS,
)
def test_what_is_held_and_can_be_taken_back_is_what_it_was(
    steps: list[int], count: int, refusing: int, lengths: tuple[int, int] | None, more: int
) -> None:
    pool = PagePool(LAYERS, windows=WINDOWS, max_bytes=400 * PAGE_BYTES)
    batch = new_batch(pool, 2)
    for step in steps:
        assert append(batch, step)
    own = None if lengths is None else list(lengths)
    rollback = [sequence.rollback for sequence in batch.layers[0].sequences]
    refused_step(batch, count if own is None else max(own), refusing, own)
    assert_rows_are_held(batch)
    pool.check()
    if own is None and count > LONGEST_WRITE:
        # Nothing was written yet.
        assert [sequence.rollback for sequence in batch.layers[0].sequences] == rollback
    for cache in batch.layers:
        back = min(sequence.rollback for sequence in cache.sequences)
    for cache in batch.layers:
        cache.trim(back)
    for row in batch.rows:
        row.trim(back)
    assert_rows_are_held(batch)
    assert append(batch, more)
    assert_rows_are_held(batch)


@pytest.mark.parametrize("count", [1, 300, 1500])
def test_a_first_step_leaves_nothing_behind(count: int) -> None:
    pool = PagePool(LAYERS, windows=WINDOWS, max_bytes=400 * PAGE_BYTES)
    known = new_batch(pool, 1)
    assert append(known, 1)
    batch = new_batch(pool, 2)
    used = pool.stats().blocks_used
    refused_step(batch, count, 2, None)
    assert pool.stats().blocks_used == used
    groups = [group for group in pool.groups if group.window]
    for sequence in batch.layers[0].sequences:
        assert not any(sequence.written(group) for group in groups)
    assert append(batch, 1500)
    assert_rows_are_held(batch)
