"""What the bytes of a page are.

A page holds 256 tokens of one layer as planes, one behind the other. A plane is an array
[heads, 256, row_words] of 16-bit words, contiguous, so a head's tokens lie side by side and a
token's row in one head is `row_words` words. A format says which planes there are and turns keys
and values into rows and back. Whoever moves rows or pages needs to know no more than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd
from typing import Protocol

import mlx.core as mx

from paged_kv.kernels.layer_geometry import LayerGeometry

PAGE_SIZE = 256
WORD = mx.uint16


@dataclass(frozen=True)
class Plane:
    """One [heads, 256, row_words] part of a page."""

    heads: int
    row_words: int

    @property
    def words(self) -> int:
        return self.heads * PAGE_SIZE * self.row_words


class PageFormat(Protocol):
    """How a page holds numbers."""

    @property
    def name(self) -> str: ...

    def planes(self, geometry: LayerGeometry) -> tuple[Plane, ...]:
        """The planes of a page, in order.

        Raises:
            ValueError: the format cannot hold this geometry.
        """
        ...

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Rows for each plane, uint16 [batch, heads, tokens, row_words], of keys and values
        [batch, heads, tokens, dim]."""
        ...

    def decode(
        self, geometry: LayerGeometry, rows: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Keys and values [..., heads, tokens, dim] of the rows of each plane."""
        ...


class SixteenBit:
    """The model's own numbers, bit for bit: float16 or bfloat16, and float32 for tests.

    Planes: keys [k_heads, 256, k_dim], values [v_heads, 256, v_dim].
    """

    name = "fp16"
    dtypes = (mx.float16, mx.bfloat16, mx.float32)

    def planes(self, geometry: LayerGeometry) -> tuple[Plane, ...]:
        for dtype in (geometry.k_dtype, geometry.v_dtype):
            if dtype not in self.dtypes:
                raise ValueError(
                    f"page_format {self.name!r} holds float16, bfloat16 or float32, got {dtype}"
                )
        keys = Plane(geometry.k_heads, geometry.k_dim * geometry.k_dtype.size // WORD.size)
        values = Plane(geometry.v_heads, geometry.v_dim * geometry.v_dtype.size // WORD.size)
        return keys, values

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        return keys.view(WORD), values.view(WORD)

    def decode(
        self, geometry: LayerGeometry, rows: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array]:
        keys, values = rows
        return keys.view(geometry.k_dtype), values.view(geometry.v_dtype)


PAGE_FORMATS: dict[str, PageFormat] = {"fp16": SixteenBit()}


def page_format_named(name: str) -> PageFormat:
    """The format of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in PAGE_FORMATS:
        known = ", ".join(repr(known) for known in PAGE_FORMATS)
        raise ValueError(f"page_format must be one of {known}, got {name!r}")
    return PAGE_FORMATS[name]


@dataclass(frozen=True)
class PageLayout:
    """Where the planes of one layer's pages lie, in units that divide every row.

    A slab is an array [pages * page_units, unit_words], so that a row of any plane is a whole
    number of the slab's rows and can be written by index.
    """

    planes: tuple[Plane, ...]

    @cached_property
    def unit_words(self) -> int:
        return gcd(*(plane.row_words for plane in self.planes))

    @cached_property
    def page_words(self) -> int:
        return sum(plane.words for plane in self.planes)

    @property
    def page_bytes(self) -> int:
        return self.page_words * WORD.size

    @cached_property
    def page_units(self) -> int:
        return self.page_words // self.unit_words

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first word of each plane within a page."""
        ends = list(accumulate(plane.words for plane in self.planes))
        return (0, *ends[:-1])
