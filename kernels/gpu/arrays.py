"""Makes the arrays that describe pages to GPU kernels. kernels/gpu/pages.h reads them, and those of
kernels/pages/tables.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import mlx.core as mx
import numpy as np

from paged_kv.kernels.gpu.kernels import LEAST_ELEMENTS
from paged_kv.kernels.pages.attention_metadata import Attention
from paged_kv.kernels.pages.layer_memory import MAX_SLABS, LayerMemory
from paged_kv.kernels.pages.number_format import Encoding
from paged_kv.kernels.pages.page_format import LayerGeometry, PageLayout, page_format_named

# Places in `params`.
PARAMETERS = (
    *("slab_stride", "table_stride", "kv_heads", "steps", "gqa_group_size", "scale", "window"),
    *("causal", "splits", "split_tiles", "new_tokens", "tokens", "q_heads", "softcap"),
)
PLACES = 16
LOG2_E = math.log2(math.e)


# Typed, because 1 and 1.0 have different bits.
@lru_cache(maxsize=1024, typed=True)
def parameters(**given: int | float) -> mx.array:
    """int32 [16]: integers, floats as their bits, and 0 for parameters that are not given.
    Cached."""
    array = np.zeros(PLACES, np.int32)
    for name, number in given.items():
        bits = np.float32(number).view(np.int32) if isinstance(number, float) else number
        array[PARAMETERS.index(name)] = bits
    return mx.array(array)


@dataclass(frozen=True, eq=False)
class Scores:
    """An `Attention` in the numbers that kernels take. Equal ones are one object, which makes
    look-ups quick.

    Attributes:
        scale: of logits in base 2.
        softcap: of logits in base 2; 0 for none.
        window: 0 for none.
        hides_later: whether a query sees no token behind its own.
        sinks: the dtype of the sinks; None for none.
    """

    scale: float
    softcap: float
    window: int
    hides_later: bool
    sinks: mx.Dtype | None

    @property
    def softcap_flag(self) -> list[str]:
        """The flag of a kernel that caps scores."""
        return ["HAS_SOFTCAP"] if self.softcap else []


_scores = lru_cache(maxsize=1024)(Scores)


@lru_cache(maxsize=1024)
def scores_of(attention: Attention) -> Scores:
    """Cached: a layer keeps its `Attention`."""
    return _scores(
        attention.scale * LOG2_E,
        (attention.softcap or 0.0) * LOG2_E,
        attention.window or 0,
        attention.hides_later,
        None if attention.sinks is None else attention.sinks.dtype,
    )


def inputs_of(attention: Attention) -> list[mx.array]:
    """The sinks, if there are any, padded to the least size of an input; kernels read them in any
    dtype."""
    sinks = attention.sinks
    if sinks is not None and sinks.size < LEAST_ELEMENTS:
        sinks = mx.pad(sinks, (0, LEAST_ELEMENTS - sinks.size))
    return [] if sinks is None else [sinks]


@dataclass(frozen=True, eq=False)
class PageKind:
    """The properties of a call's pages on which a kernel and its parameters depend. Equal kinds are
    one object, which makes look-ups quick.

    Attributes:
        formats: the names of the page formats that occur, sorted.
    """

    geometry: LayerGeometry
    slab_stride: int
    formats: tuple[str, ...]

    @cached_property
    def flags(self) -> tuple[str, ...]:
        """The number formats that occur, as flags of kernels/gpu/pages.h."""
        each = [one for pair in self._encodings for one in pair]
        codes = ["HAS_CODES"] if any(one.group for one in each) else []
        return tuple(sorted({*codes, *[f"HAS_{one.gpu_name}" for one in each]}))

    @property
    def _encodings(self) -> list[tuple[Encoding, Encoding]]:
        layouts = [PageLayout(page_format_named(each), self.geometry) for each in self.formats]
        return list(map(_encodings, layouts))

    @property
    def dims(self) -> dict[str, int]:
        """The sizes of heads, as constants of kernels."""
        return {"K_DIM": self.geometry.k_dim, "V_DIM": self.geometry.v_dim}


page_kind = cache(PageKind)


@dataclass(frozen=True)
class BoundSlabs:
    """The slabs of a call.

    Attributes:
        inputs: handles of 16 slabs, the first one repeated if there are fewer, then their
            layouts, int32 [16, 7]; see kernels/gpu/pages.h.
        count: how many of the slabs differ, rounded up to a power of two.
    """

    inputs: tuple[mx.array, ...]
    kind: PageKind
    count: int

    @property
    def handles(self) -> list[mx.array]:
        """The first `count` handles, and the layouts."""
        *handles, layouts = self.inputs
        return [*handles[: self.count], layouts]

    def with_handles(self, handles: list[mx.array]) -> BoundSlabs:
        *slabs, layouts = handles
        spare = MAX_SLABS - len(slabs)
        return BoundSlabs((*slabs, *slabs[:1] * spare, layouts), self.kind, self.count)


def bound_slabs(pages: LayerMemory, numbers: tuple[int, ...]) -> BoundSlabs:
    """Bind at most 16 slabs of a layer; any one if none is named. Cached until its slabs change."""
    if numbers not in pages.memo:
        slabs = [pages.slabs[number] for number in numbers or tuple(pages.slabs)[:1]]
        memory = [(slab.memory, slab.layout) for slab in slabs]
        pages.memo[numbers] = bind(memory, pages.slab_stride)
    bound: BoundSlabs = pages.memo[numbers]
    return bound


def bind(slabs: Sequence[tuple[mx.array, PageLayout]], slab_stride: int) -> BoundSlabs:
    """Bind slabs as inputs of a kernel, in the given order."""
    assert 0 < len(slabs) <= MAX_SLABS
    handles = [handle(memory) for memory, _ in slabs]
    # Without waiting for the device: a prompt step maps and binds slabs in each layer.
    mx.async_eval(handles)  # type: ignore[no-untyped-call]  # mlx's stubs forget its types
    layouts = [layout for _, layout in slabs]
    spare = MAX_SLABS - len(slabs)
    fields = [*map(_fields, layouts)]
    formats = sorted({layout.page_format.name for layout in layouts})
    kind = page_kind(layouts[0].geometry, slab_stride, tuple(formats))
    array = mx.array(np.array([*fields, *fields[:1] * spare], np.int32))
    count = min(MAX_SLABS, 1 << (len(slabs) - 1).bit_length())
    return BoundSlabs((*handles, *handles[:1] * spare, array), kind, count)


def handle(slab: mx.array) -> mx.array:
    """An array of 8 words with the address of a slab, which is all that a kernel takes of it.

    MLX commits what it has encoded when the inputs of it exceed some MB: after each layer, if they
    were whole slabs. It raises a RuntimeError if a slab is not contiguous: a kernel would write a
    copy of it.
    """
    return mx.as_strided(slab, (LEAST_ELEMENTS,), (1,))


def _fields(layout: PageLayout) -> list[int]:
    """A slab's row of `layouts`; offsets are in words."""
    begins, formats = layout.begins, [each.gpu for each in _encodings(layout)]
    at = begins.key_scales, begins.values, begins.value_scales
    return [layout.page_words, *at, *formats, begins.key_centres]


def _encodings(layout: PageLayout) -> tuple[Encoding, Encoding]:
    page_format, geometry = layout.page_format, layout.geometry
    keys = page_format.keys.encoding(geometry.k_dtype)
    return keys, page_format.values.encoding(geometry.v_dtype)
