"""Writes, reads and converts sequences, in one layer or in all."""

from __future__ import annotations

from collections.abc import Set
from functools import partial

import mlx.core as mx

from paged_kv.allocator.block_table import BlockTable
from paged_kv.kernels.pages.page_format import PageFormat
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.sequences.full_pages import full_blocks
from paged_kv.sequences.paged_array import PagedKeys, PagedValues, gathered_arrays
from paged_kv.sequences.sequence import Sequence
from paged_kv.sequences.step import Step, unwritten_step
from paged_kv.sequences.step_row import StepRow, layers_as_far
from paged_kv.sizes import counted


def append(
    pool: PagePool, layer: int, sequences: list[Sequence], keys: mx.array, values: mx.array
) -> tuple[PagedKeys, PagedValues]:
    """Write the valid tokens of a step of S tokens to pages, in one layer; returns as `read`.

    keys [B, k_heads, S, k_dim], values [B, v_heads, S, v_dim], B the number of sequences.

    Each error also undoes the writes of other layers in the same step.

    Raises:
        ValueError: shapes or dtypes do not fit this layer or a page format.
        PoolExhausted: the budget does not hold the blocks.
        ThreadConflict: another thread has not yet computed its reads of these pages.
    """
    if keys.shape[0] != len(sequences):
        raise ValueError(
            f"layer {layer} holds {counted(len(sequences), 'sequence')}, got a batch of "
            f"{keys.shape[0]}"
        )
    with pool.lock:
        if keys.shape[2] == 0:
            return read(pool, layer, sequences)
        return begin_step(pool, layer, sequences, keys.shape[2]).write(layer, keys, values)


def begin_step(pool: PagePool, layer: int, sequences: list[Sequence], count: int) -> Step:
    """Begin the step of each sequence's next `count` tokens, padding included, for one layer and
    all others with as many tokens. Closes any other step of these sequences."""
    with pool.lock:
        latest = sequences[0].step() if sequences else None
        if isinstance(latest, Step) and latest.is_complete and latest.sequences == sequences:
            rows = [row.following(count) for row in latest.rows]
            return Step(pool, rows, count, latest.layers)
        layers = layers_as_far(sequences, layer, pool.num_layers)
        rows = [StepRow.next(sequence, layer, count) for sequence in sequences]
        return Step(pool, rows, count, layers)


def read(pool: PagePool, layer: int, sequences: list[Sequence]) -> tuple[PagedKeys, PagedValues]:
    """All keys and values of the sequences in one layer.

    Raises:
        ValueError: the layer has not been written yet.
    """
    with pool.lock:
        if layer not in pool.group_of(layer).pages:
            raise ValueError(f"layer {layer} has no keys and values yet: nothing was written")
        step = sequences[0].step() if sequences else None
        has_taken = isinstance(step, Step) and layer in step.layers - step.waiting
        if not isinstance(step, Step) or not has_taken or step.sequences != sequences:
            if unwritten_step(layer, sequences) is None:
                commit(sequences, {layer})
            rows = [StepRow.latest(sequence, layer) for sequence in sequences]
            step = Step(pool, rows, 0, {layer})
        return gathered_arrays(step.read(layer))


def commit(sequences: list[Sequence], layers: Set[int] | None = None) -> None:
    """Write the pending steps of all layers, or of `layers`. No query can attend to the latest
    step of these afterwards."""
    for sequence in sequences:
        sequence.commit(layers)


def convert(pool: PagePool, sequences: list[Sequence], page_format: PageFormat) -> None:
    """Convert all full pages of the sequences to a format, but for those of rings; later ones get
    it too, once they are full. Other sequences that share the pages keep them unchanged.

    O(1) for a sequence that was converted before. Memory holds the pages of one slab at a time in
    both formats.

    Raises:
        ValueError: the format cannot hold a layer's keys and values; nothing was changed.
        PoolExhausted: the budget does not hold the new pages of a slab beside the old ones.
            Converted pages stay converted, and another call resumes.
    """
    with pool.lock:
        others = [each for each in sequences if not each.is_held_in(page_format)]
        if not others:
            return
        open_groups = [group for group in pool.groups if group.is_open and group.window is None]
        for group in open_groups:
            group.add_format(page_format)
        commit(others)
        for sequence in others:
            sequence.begin_conversion(page_format)
        for group in open_groups:
            full = partial(_full_blocks, others, group)
            make_room = partial(_make_room, pool, group, page_format.name)
            group.convert(full, page_format, make_room)
        for sequence in others:
            sequence.is_converting = False


def _full_blocks(sequences: list[Sequence], group: LayerGroup) -> dict[BlockTable, tuple[int, ...]]:
    return {sequence.table(group): full_blocks(sequence, group) for sequence in sequences}


def _make_room(pool: PagePool, group: LayerGroup, page_format: str, count: int) -> None:
    pool.reclaimer.make_room(lambda: {group: {page_format: count}})
