"""What a GPU kernel is told of pages and rows; kernels/gpu/pages.h is the other end."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from paged_kv.kernels.gpu_kernels import SLABS
from paged_kv.kernels.number_format import NumberFormat, Quantised
from paged_kv.kernels.page_format import PageLayout
from paged_kv.kernels.page_rows import PageRows

if TYPE_CHECKING:
    from paged_kv.kernels.layer_pages import LayerPages

# Places in `params`.
PARAMETERS = (
    "slab_stride",
    "table_stride",
    "kv_heads",
    "steps",
    "ratio",
    "scale",
    "window",
    "causal",
    "splits",
    "split_tiles",
    "first_basis",
    "bases",
    "tail",
    "has_sinks",
    "tokens",
    "q_heads",
)
ROW_FIELDS = 4
LAYOUT_FIELDS = 8
# Tables are a multiple of so many numbers wide, so that few are made of sizes of their own.
TABLE_WIDTH = 16


def parameters(**given: int | float) -> mx.array:
    """int32 [16]; floats as their bits, and 0 where nothing is given."""
    array = np.zeros(len(PARAMETERS), np.int32)
    for name, number in given.items():
        bits = np.float32(number).view(np.int32) if isinstance(number, float) else number
        array[PARAMETERS.index(name)] = bits
    return mx.array(array)


@dataclass(frozen=True)
class Tables:
    """A batch's tables, whose entries count only the slabs that occur.

    Attributes:
        array: int32 [rows, width]: context length, right padding, tokens of the head, the first of
            the others, then entries.
        slabs: the numbers of the slabs.
    """

    array: mx.array
    slabs: tuple[int, ...]


def tables_of(rows: PageRows, slab_stride: int) -> Tables:
    """Made once for all layers that read the same rows."""
    if "gpu" not in rows.memo:
        rows.memo["gpu"] = _new_tables(rows, slab_stride)
    tables: Tables = rows.memo["gpu"]
    return tables


def _new_tables(rows: PageRows, slab_stride: int) -> Tables:
    entries = rows.block_table_array
    used = np.zeros(entries.shape, bool)
    for row, table in enumerate(rows.block_tables):
        used[row, : len(table)] = True
    slabs, pages = np.divmod(entries, slab_stride)
    numbers = np.unique(slabs[used])
    own = np.searchsorted(numbers, slabs) * slab_stride + pages
    width = -(-(ROW_FIELDS + entries.shape[1]) // TABLE_WIDTH) * TABLE_WIDTH
    array = np.zeros((len(rows.context_lens), width), np.int32)
    array[:, 0], array[:, 1] = rows.context_lens, rows.right_padding
    array[:, 2], array[:, 3] = rows.head_tokens or 0, rows.first_tokens or 0
    array[:, ROW_FIELDS : ROW_FIELDS + entries.shape[1]] = np.where(used, own, 0)
    return Tables(mx.array(array), tuple(numbers.tolist()))


@dataclass(frozen=True)
class BoundSlabs:
    """The slabs of a call.

    Attributes:
        memory: of 16 slabs, the first again where there are less.
        layouts: int32 [16, 8]; see kernels/gpu/pages.h.
        formats: which number formats occur, as a sum: 1 for floats, 2 for q8, 4 for q4.
        bases: which bases of values occur, in order: 0 as they are, 1 rotated.
    """

    memory: tuple[mx.array, ...]
    layouts: mx.array
    formats: int
    bases: tuple[int, ...]


def bound_slabs(pages: "LayerPages", numbers: tuple[int, ...]) -> BoundSlabs:
    """At most 16 slabs of a layer. Made once, until its slabs change."""
    made: dict[tuple[int, ...], BoundSlabs] = pages.memo.setdefault("gpu", {})
    if numbers not in made:
        slabs = {number: pages.slabs[number] for number in numbers}
        made[numbers] = bind({n: (slab.memory, slab.layout) for n, slab in slabs.items()})
    return made[numbers]


def bind(slabs: Mapping[int, tuple[mx.array, PageLayout]]) -> BoundSlabs:
    """Slabs by number, as a kernel takes them, in their order."""
    assert 0 < len(slabs) <= SLABS
    memory = [memory for memory, _ in slabs.values()]
    for array in memory:
        # A kernel writes through the array: of one that is not one piece MLX might take a copy.
        assert np.asarray(array).flags.c_contiguous
    layouts = [layout for _, layout in slabs.values()]
    spare = SLABS - len(slabs)
    fields = [_fields(layout) for layout in [*layouts, *layouts[:1] * spare]]
    held = {each for layout in layouts for each in _formats(layout)}
    return BoundSlabs(
        memory=(*memory, *memory[:1] * spare),
        layouts=mx.array(np.array(fields, np.int32)),
        formats=sum({mask for mask, _ in held}),
        bases=tuple(sorted({layout.page_format.values.is_rotated for layout in layouts})),
    )


def _fields(layout: PageLayout) -> list[int]:
    """In words."""
    keys, geometry, at = layout.page_format.keys, layout.geometry, layout.offsets
    first = len(keys.row_words(geometry.k_dim, geometry.k_dtype))  # of the values' planes
    (_, k_bits), (_, v_bits) = _formats(layout)
    rotated = keys.is_rotated, layout.page_format.values.is_rotated
    return [layout.page_words, at[first - 1], at[first], at[-1], k_bits, v_bits, *map(int, rotated)]


def _formats(layout: PageLayout) -> list[tuple[int, int]]:
    """Of keys and of values, the number of the format in a sum, and its bits."""

    def of(number_format: NumberFormat) -> tuple[int, int]:
        bits = number_format.bits if isinstance(number_format, Quantised) else 16
        return {16: 1, 8: 2, 4: 4}[bits], bits

    return [of(layout.page_format.keys), of(layout.page_format.values)]
