"""Gathers single tokens from pages of 16 bits at once, for the CPU backend.

MLX's operations read every token from each slab, as its index is known only when it is computed. A
backend whose calls are complete when they return can compute the indices first, and copy each token
once.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_memory import LayerMemory, Slab
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, PageLayout
from paged_kv.kernels.plain import token_gather

_Places = dict[int, tuple[npt.NDArray[np.intp], ...]]
"""By slab: rows and columns of the tokens there, their pages in the slab, and slots in these."""


def gather_tokens(
    pages: LayerMemory, metadata: AttentionMetadata, indices: mx.array
) -> tuple[mx.array, mx.array]:
    """See `Backend.gather_tokens`. By MLX's operations if pages are quantised."""
    places = _places(metadata, indices, pages.slab_stride)
    if any(pages.slabs[slab].layout.page_format != FP16 for slab in places):
        return token_gather.gather_tokens(pages, metadata, indices)
    planes = []
    for plane, words in enumerate(PageLayout(FP16, pages.geometry).planes):
        tokens = np.zeros((*indices.shape, words.heads, words.slot_words), np.uint16)
        for slab, (rows, columns, page, slot) in places.items():
            tokens[rows, columns] = _by_token(pages.slabs[slab], plane)[page, slot]
        planes.append(mx.array(tokens).swapaxes(1, 2))
    return FP16.decode(pages.geometry, planes)


def _places(metadata: AttentionMetadata, indices: mx.array, stride: int) -> _Places:
    """Where the tokens are. Padding is nowhere."""
    ends = np.array(metadata.ends)
    positions = np.array(indices).astype(np.intp) - (ends.max() - ends)[:, None]
    lengths = np.array(metadata.context_lens)[:, None]
    rows, columns = np.nonzero((positions >= 0) & (positions < lengths))
    positions = positions[rows, columns]
    entries = metadata.block_table_array[rows, positions // PAGE_SIZE]
    slabs, slots = entries // stride, positions % PAGE_SIZE
    places: _Places = {}
    for slab in np.unique(slabs).tolist():
        here = slabs == slab
        places[slab] = rows[here], columns[here], entries[here] % stride, slots[here]
    return places


def _by_token(slab: Slab, plane: int) -> npt.NDArray[np.uint16]:
    """A view of the words of one plane, [pages, 256, heads, slot_words]."""
    layout = slab.layout
    heads, words = layout.planes[plane].heads, layout.planes[plane].slot_words
    numbers = np.asarray(slab.memory).reshape(-1, layout.page_words)
    first = layout.offsets[plane]
    of_plane = numbers[:, first : first + heads * PAGE_SIZE * words]
    return of_plane.reshape(-1, heads, PAGE_SIZE, words).swapaxes(1, 2)
