"""Gathers single tokens from pages, for models that choose the tokens that they attend to.

Which tokens these are is known only when their indices are computed, so MLX looks them up in the
block tables.
"""

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_memory import LayerMemory, Slab
from paged_kv.kernels.pages.page_format import PAGE_SIZE


class _Tables(NamedTuple):
    """A batch's block tables as arrays.

    Attributes:
        entries: int32 [B, entries of the longest table].
        begins: the index of each sequence's first token among T, int32 [B, 1].
        lengths: the tokens of each sequence, int32 [B, 1].
        slabs: the slabs that hold its pages.
    """

    entries: mx.array
    begins: mx.array
    lengths: mx.array
    slabs: list[int]


class _Slots(NamedTuple):
    """Where tokens are: in which slab, page of the slab, and slot of the page, int32 [B, K]."""

    slabs: mx.array
    pages: mx.array
    slots: mx.array


def gather_tokens(
    pages: LayerMemory, metadata: AttentionMetadata, indices: mx.array
) -> tuple[mx.array, mx.array]:
    """See `Backend.gather_tokens`."""
    tables, stride = _tables(metadata, pages.slab_stride), pages.slab_stride
    positions = indices.astype(mx.int32) - tables.begins
    is_valid = (positions >= 0) & (positions < tables.lengths)
    positions = mx.where(is_valid, positions, 0)
    entries = mx.take_along_axis(tables.entries, positions // PAGE_SIZE, axis=1)
    places = _Slots(entries // stride, entries % stride, positions % PAGE_SIZE)
    keys, values = _read(pages, places, tables.slabs)
    is_valid = is_valid[:, None, :, None]
    return mx.where(is_valid, keys, 0), mx.where(is_valid, values, 0)


def _tables(metadata: AttentionMetadata, slab_stride: int) -> _Tables:
    """Made once for all layers that read the same batch."""
    if "tables" not in metadata.memo:
        entries, ends = metadata.block_table_array, np.array(metadata.ends, np.int32)
        columns = ends.max() - ends, np.array(metadata.context_lens, np.int32)
        begins, lengths = (mx.array(column[:, None]) for column in columns)
        slabs = np.unique(entries // slab_stride).tolist()
        metadata.memo["tables"] = _Tables(mx.array(entries), begins, lengths, slabs)
    tables: _Tables = metadata.memo["tables"]
    return tables


def _read(pages: LayerMemory, places: _Slots, slabs: list[int]) -> tuple[mx.array, mx.array]:
    """Keys and values [B, heads, K, dim]."""
    first, *others = slabs
    keys, values = _read_slab(pages.slabs[first], places, first)
    for slab in others:
        is_here = (places.slabs == slab)[:, None, :, None]
        here = _read_slab(pages.slabs[slab], places, slab)
        keys, values = mx.where(is_here, here[0], keys), mx.where(is_here, here[1], values)
    return keys, values


def _read_slab(slab: Slab, places: _Slots, number: int) -> tuple[mx.array, mx.array]:
    """Keys and values [B, heads, K, dim]; anything for tokens of other slabs."""
    layout = slab.layout
    page_ids = mx.where(places.slabs == number, places.pages, 0)
    planes = [
        words.swapaxes(1, 2)[page_ids, places.slots % plane.slots].swapaxes(1, 2)
        for plane, words in zip(layout.planes, slab.planes, strict=True)
    ]
    return layout.page_format.decode(layout.geometry, planes)
