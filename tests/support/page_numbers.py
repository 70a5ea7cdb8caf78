"""The numbers that pages of any format hold: the input of the kernels' arithmetic.

Only full pages are recoded to a quantised format. Here any page holds any number of tokens, as
after a trim, and no kernel is needed.
"""

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import NumberFormat, Quantised
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from tests.support.arrays import numbers
from tests.support.dense_attention import Numbers


def numbers_in(
    pages: LayerPages, table: tuple[int, ...], length: int
) -> tuple[list[Numbers], list[Numbers]]:
    """Keys and values, each [heads, tokens, dim], of one sequence's pages."""
    keys, values = [], []
    for at, entry in enumerate(table):
        count = min(length - at * PAGE_SIZE, PAGE_SIZE)
        held, planes = pages.layout_of(entry).page_format, _planes(pages, entry, count)
        first = held.key_planes(pages.geometry)
        keys.append(_decoded(held.keys, planes[:first], pages.geometry.k_dtype))
        values.append(_decoded(held.values, planes[first:], pages.geometry.v_dtype))
    return keys, values


def holding(
    pages: LayerPages, keys: mx.array, values: mx.array, metadata: AttentionMetadata
) -> Mapping[int, mx.array]:
    """Pages for `LayerPages.load` that hold a step's valid tokens, encoded by plain operations.
    Their other slots stay as they are."""
    contents: dict[int, mx.array] = {}
    for row, own in enumerate(metadata.valid_tokens(keys.shape[2])):
        end = metadata.context_lens[row]
        first_token = own.stop - end  # the token of the step at position 0
        for at in range((end - len(own)) // PAGE_SIZE, -(-end // PAGE_SIZE)):
            first, last = max(end - len(own), at * PAGE_SIZE), min(end, (at + 1) * PAGE_SIZE)
            part = np.s_[row : row + 1, :, first_token + first : first_token + last]
            entry, slots = metadata.block_tables[row][at], np.arange(first, last) % PAGE_SIZE
            contents[entry] = _with_slots(pages, entry, slots, keys[part], values[part])
    return contents


def _with_slots(
    pages: LayerPages, entry: int, slots: npt.NDArray[np.int_], keys: mx.array, values: mx.array
) -> mx.array:
    """A page with these tokens in some of its slots."""
    layout, page = pages.layout_of(entry), np.array(pages.page(entry))
    encoded = layout.page_format.encode(keys, values)
    for plane, offset, new in zip(layout.planes, layout.offsets, encoded, strict=True):
        words = page.reshape(-1)[offset : offset + plane.words]
        taken = slots if plane.slots == PAGE_SIZE else np.array([0])
        words.reshape(plane.heads, plane.slots, plane.slot_words)[:, taken] = np.asarray(new)[0]
    return mx.array(page)


def _planes(pages: LayerPages, entry: int, count: int) -> list[mx.array]:
    """The first slots of each plane of a page, [heads, count or 1, slot_words]."""
    layout, words = pages.layout_of(entry), pages.page(entry).reshape(-1)
    return [
        words[offset : offset + plane.words].reshape(plane.heads, plane.slots, -1)[:, :count]
        for plane, offset in zip(layout.planes, layout.offsets, strict=True)
    ]


def _decoded(held: NumberFormat, planes: list[mx.array], dtype: mx.Dtype) -> Numbers:
    """A code times its scale is not rounded to the model's dtype."""
    return numbers(held.decode(planes, mx.float32 if isinstance(held, Quantised) else dtype))
