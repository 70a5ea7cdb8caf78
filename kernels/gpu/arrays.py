"""What a GPU kernel is told of pages and rows; kernels/gpu/pages.h is the other end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from paged_kv.kernels.gpu.kernels import SLABS
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_memory import LayerMemory
from paged_kv.kernels.pages.number_format import NumberFormat, Quantised
from paged_kv.kernels.pages.page_format import PageLayout

# Places in `params`.
PARAMETERS = (
    "slab_stride",
    "table_stride",
    "kv_heads",
    "steps",
    "gqa_group_size",
    "scale",
    "window",
    "causal",
    "splits",
    "split_tiles",
    "first_basis",
    "bases",
    "tail",
    "tokens",
    "q_heads",
)
PLACES = 16
ROW_FIELDS = 4
LAYOUT_FIELDS = 8
# Tables are a multiple of so many numbers wide, so that few are made of sizes of their own.
TABLE_WIDTH = 16


# Typed, as 1 and 1.0 are different bits.
@lru_cache(maxsize=1024, typed=True)
def parameters(**given: int | float) -> mx.array:
    """int32 [16]; floats as their bits, and 0 where nothing is given. Made once, and computed."""
    array = np.zeros(PLACES, np.int32)
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
        plans: what is made of the rows for all layers of a kind, by what it depends on.
    """

    array: mx.array
    slabs: tuple[int, ...]
    plans: dict[Any, Any] = field(default_factory=dict)


# Where rows keep theirs.
TABLES = "gpu"


def tables_of(rows: AttentionMetadata, slab_stride: int) -> Tables:
    """Made once for all layers that read the same rows."""
    if TABLES not in rows.memo:
        rows.memo[TABLES] = _new_tables(rows, slab_stride)
    tables: Tables = rows.memo[TABLES]
    return tables


def _new_tables(rows: AttentionMetadata, slab_stride: int) -> Tables:
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


@dataclass(frozen=True, eq=False)
class PageKind:
    """What a kernel and its parameters depend on, of the pages of a call. Two of the same kind are
    one object, so that it is quick to look up.

    Attributes:
        flags: which number formats occur, in the words of kernels/gpu/pages.h.
        bases: which bases of values occur, in order: 0 as they are, 1 rotated.
    """

    geometry: LayerGeometry
    slab_stride: int
    flags: tuple[str, ...]
    bases: tuple[int, ...]


@cache
def page_kind(
    geometry: LayerGeometry, slab_stride: int, bits: frozenset[int], bases: frozenset[bool]
) -> PageKind:
    """Of pages whose keys and values have numbers of so many bits."""
    names = {16: "HAS_FLOATS", 8: "HAS_Q8", 4: "HAS_Q4"}
    flags = [names[each] for each in sorted(bits)]
    if bits != {16}:
        flags.append("HAS_CODES")
    return PageKind(geometry, slab_stride, tuple(flags), tuple(sorted(map(int, bases))))


@dataclass(frozen=True)
class BoundSlabs:
    """The slabs of a call.

    Attributes:
        inputs: the memory of 16 slabs, the first again where there are less, and int32 [16, 8]; see
            kernels/gpu/pages.h.
    """

    inputs: tuple[mx.array, ...]
    kind: PageKind


def bound_slabs(pages: LayerMemory, numbers: tuple[int, ...]) -> BoundSlabs:
    """At most 16 slabs of a layer, any one if none is named. Made once, until its slabs change."""
    if numbers not in pages.memo:
        slabs = [pages.slabs[number] for number in numbers or tuple(pages.slabs)[:1]]
        memory = [(slab.memory, slab.layout) for slab in slabs]
        pages.memo[numbers] = bind(memory, pages.slab_stride)
    bound: BoundSlabs = pages.memo[numbers]
    return bound


def bind(slabs: Sequence[tuple[mx.array, PageLayout]], slab_stride: int) -> BoundSlabs:
    """Slabs as a kernel takes them, in their order."""
    assert 0 < len(slabs) <= SLABS
    memory = [memory for memory, _ in slabs]
    for array in memory:
        # A kernel writes through the array: of one that is not one piece MLX might take a copy.
        assert np.asarray(array).flags.c_contiguous
    layouts = [layout for _, layout in slabs]
    spare = SLABS - len(slabs)
    fields = [_fields(layout) for layout in [*layouts, *layouts[:1] * spare]]
    kind = page_kind(
        layouts[0].geometry,
        slab_stride,
        frozenset(bits for layout in layouts for bits in _bits(layout)),
        frozenset(layout.page_format.values.is_rotated for layout in layouts),
    )
    array = mx.array(np.array(fields, np.int32))
    return BoundSlabs((*memory, *memory[:1] * spare, array), kind)


def _fields(layout: PageLayout) -> list[int]:
    """In words."""
    keys, geometry, at = layout.page_format.keys, layout.geometry, layout.offsets
    first = len(keys.row_words(geometry.k_dim, geometry.k_dtype))  # of the values' planes
    k_bits, v_bits = _bits(layout)
    rotated = keys.is_rotated, layout.page_format.values.is_rotated
    return [layout.page_words, at[first - 1], at[first], at[-1], k_bits, v_bits, *map(int, rotated)]


def _bits(layout: PageLayout) -> list[int]:
    """Of a number of keys and of one of values."""

    def of(number_format: NumberFormat) -> int:
        return number_format.bits if isinstance(number_format, Quantised) else 16

    return [of(layout.page_format.keys), of(layout.page_format.values)]
