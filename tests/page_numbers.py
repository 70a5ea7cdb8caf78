"""The numbers that pages of any format hold: the input of the kernels' arithmetic."""

import mlx.core as mx

from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import NumberFormat, Quantised
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from tests.arrays import numbers
from tests.dense_attention import Numbers


def numbers_in(
    pages: LayerPages, table: tuple[int, ...], length: int
) -> tuple[list[Numbers], list[Numbers]]:
    """Keys and values, each [heads, tokens, dim], of one sequence's pages."""
    keys, values = [], []
    for at, entry in enumerate(table):
        count = min(length - at * PAGE_SIZE, PAGE_SIZE)
        held, planes = pages.layout_of(entry).page_format, _planes(pages, entry, count)
        first = 2 if isinstance(held.keys, Quantised) else 1
        keys.append(_decoded(held.keys, planes[:first], pages.geometry.k_dtype))
        values.append(_decoded(held.values, planes[first:], pages.geometry.v_dtype))
    return keys, values


def _planes(pages: LayerPages, entry: int, count: int) -> list[mx.array]:
    """The first slots of each plane of a page, [heads, count, slot_words]."""
    layout, words = pages.layout_of(entry), pages.page(entry).reshape(-1)
    return [
        words[offset : offset + plane.words].reshape(plane.heads, PAGE_SIZE, -1)[:, :count]
        for plane, offset in zip(layout.planes, layout.offsets, strict=True)
    ]


def _decoded(held: NumberFormat, planes: list[mx.array], dtype: mx.Dtype) -> Numbers:
    """A code times its scale is not rounded to the model's dtype."""
    return numbers(held.decode(planes, mx.float32 if isinstance(held, Quantised) else dtype))
