"""Page formats: the layout of a page in bytes, for the shape of a layer's keys and values.

A page holds 256 tokens of one layer as planes, one behind the other. A plane is an array
[heads, 256, slot_words] of 16-bit words, contiguous, so a head's tokens lie side by side and a
slot of one head is `slot_words` words; or [heads, 1, slot_words], where all tokens share a slot.
Keys have one plane or more, by their number format, then values have theirs. Code that moves slots
or pages needs to know no more than that. Behind them a page may hold summaries of its keys, in the
same float16 in every format: they are made when a step fills the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd
from typing import NamedTuple

import mlx.core as mx

from paged_kv.kernels.pages.number_format import (
    KEY_FORMATS,
    MOST,
    VALUE_FORMATS,
    WORD,
    NumberFormat,
)

PAGE_SIZE = 256

# A run: an eighth of a page, whose keys are summarised, and which is read or left out as a whole.
# With 16, summaries take twice the memory and reading, and lose nearly as much; with 64 they lose
# more.
RUN_TOKENS = 32


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


@dataclass(frozen=True)
class LayerGeometry:
    """Heads, head sizes and dtypes of a layer's keys and of its values, which may differ.

    Attributes:
        has_summaries: whether pages hold summaries of their keys too.
    """

    k_heads: int
    k_dim: int
    k_dtype: mx.Dtype
    v_heads: int
    v_dim: int
    v_dtype: mx.Dtype
    has_summaries: bool = False

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> "LayerGeometry":
        """The geometry of keys and values [batch, heads, tokens, dim].

        Raises:
            ValueError: they do not have four dimensions, or differ in batch or tokens.
        """
        if keys.ndim != 4 or values.ndim != 4:
            raise ValueError(
                "keys and values must be [batch, heads, tokens, dim], "
                f"got {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        if keys.shape[0] != values.shape[0] or keys.shape[2] != values.shape[2]:
            raise ValueError(
                "keys and values must have the same batch and tokens, "
                f"got {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        return cls(
            k_heads=keys.shape[1],
            k_dim=keys.shape[3],
            k_dtype=keys.dtype,
            v_heads=values.shape[1],
            v_dim=values.shape[3],
            v_dtype=values.dtype,
        )

    @cached_property
    def is_alike(self) -> bool:
        """Whether keys and values have the same shape and dtype."""
        keys = self.k_heads, self.k_dim, self.k_dtype
        return keys == (self.v_heads, self.v_dim, self.v_dtype)

    def fits(self, keys: mx.array, values: mx.array) -> bool:
        """Whether keys and values [batch, heads, tokens, dim] have this geometry."""
        return (
            keys.ndim == values.ndim == 4
            and keys.shape[::2] == values.shape[::2]
            and (self.k_heads, self.k_dim) == keys.shape[1::2]
            and (self.v_heads, self.v_dim) == values.shape[1::2]
            and (self.k_dtype, self.v_dtype) == (keys.dtype, values.dtype)
        )

    def __str__(self) -> str:
        keys = f"({self.k_heads}, {self.k_dim}) {_name(self.k_dtype)}"
        values = f"({self.v_heads}, {self.v_dim}) {_name(self.v_dtype)}"
        both = keys if keys == values else f"keys {keys} and values {values}"
        return f"{both} with summaries" if self.has_summaries else both


@dataclass(frozen=True)
class Plane:
    """One [heads, slots, slot_words] part of a page.

    Attributes:
        slots: one for each token, or 1 for all.
    """

    heads: int
    slot_words: int
    slots: int = PAGE_SIZE

    @property
    def head_words(self) -> int:
        return self.slots * self.slot_words

    @property
    def words(self) -> int:
        return self.heads * self.head_words


@dataclass(frozen=True)
class PageFormat:
    """The number formats of keys and of values in a page."""

    keys: NumberFormat
    values: NumberFormat

    @property
    def name(self) -> str:
        """Such as "q4", or "q8/q4" where keys and values differ."""
        keys, values = self.keys.name, self.values.name
        return keys if keys == values else f"{keys}/{values}"

    @cached_property
    def first(self) -> "PageFormat":
        """The format of a sequence's first page: q8 instead of q4.

        Nearly every query attends to the first tokens, whatever they are: attention sinks (Xiao et
        al., "Efficient Streaming Language Models with Attention Sinks", 2023). So most of q4's
        loss comes from this page: 8 bits there halve the divergence of SmolLM2-135M, and leave a
        third of Gemma 3 270M's. With 16 bits it is no less.
        """
        return PageFormat(self.keys.first, self.values.first)

    def planes(self, geometry: LayerGeometry) -> tuple[Plane, ...]:
        """The planes of a page, in order.

        Raises:
            ValueError: the format cannot hold this geometry.
        """
        keys = _planes(self.keys, geometry.k_heads, geometry.k_dim, geometry.k_dtype)
        return keys + _planes(self.values, geometry.v_heads, geometry.v_dim, geometry.v_dtype)

    def key_planes(self, geometry: LayerGeometry) -> int:
        """How many of the planes hold keys; those of values follow."""
        return len(_planes(self.keys, geometry.k_heads, geometry.k_dim, geometry.k_dtype))

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Words of each plane, uint16 [batch, heads, tokens or 1, slot_words], of a page's keys and
        values [batch, heads, tokens, dim]."""
        return self.keys.encode(keys) + self.values.encode(values)

    def decode(
        self, geometry: LayerGeometry, encoded: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Keys and values [..., heads, tokens, dim] of the words of each plane."""
        first = self.key_planes(geometry)
        keys = self.keys.decode(encoded[:first], geometry.k_dtype)
        return keys, self.values.decode(encoded[first:], geometry.v_dtype)


def _planes(
    number_format: NumberFormat, heads: int, dim: int, dtype: mx.Dtype
) -> tuple[Plane, ...]:
    of_tokens = [Plane(heads, words) for words in number_format.slot_words(dim, dtype)]
    centres = [Plane(heads, dim, slots=1)] if number_format.is_centred else []
    return (*of_tokens, *centres)


FormatName = str | tuple[str, str]
"""The name of a page format, or the names of its formats of keys and values."""


def page_format_named(name: FormatName) -> PageFormat:
    """The format of that name.

    Raises:
        ValueError: there is none.
    """
    parts = tuple(name.split("/") if isinstance(name, str) else name)
    is_known = all(isinstance(part, str) and part in KEY_FORMATS for part in parts)
    if not is_known or len(parts) not in ((1, 2) if isinstance(name, str) else (2,)):
        known = ", ".join(map(repr, KEY_FORMATS))
        raise ValueError(
            f"{name!r} is no page format: there are {known}, two of those for keys and values, "
            "such as 'q8/q4', and 'auto'"
        )
    return PageFormat(KEY_FORMATS[parts[0]], VALUE_FORMATS[parts[-1]])


FP16 = page_format_named("fp16")


class Begins(NamedTuple):
    """Where planes of keys and values begin within a page, in words; 0 where keys have no
    centres."""

    key_scales: int
    key_centres: int
    values: int
    value_scales: int


@dataclass(frozen=True)
class PageLayout:
    """Where the planes of one layer's pages of one format lie, in units that divide every slot.

    A slab is an array [pages * page_units, unit_words], so that a slot of any plane is a whole
    number of its lines and can be written by index.

    Raises:
        ValueError: the format cannot hold this geometry.
    """

    page_format: PageFormat
    geometry: LayerGeometry

    def __post_init__(self) -> None:
        assert self.planes

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of a page, in order."""
        return self.page_format.planes(self.geometry)

    @cached_property
    def summaries(self) -> Plane | None:
        """The plane behind these, [k_heads, 8, 2 * k_dim], if pages hold summaries of keys: see
        `summaries_of`."""
        if not self.geometry.has_summaries:
            return None
        slot_words, slots = 2 * self.geometry.k_dim, PAGE_SIZE // RUN_TOKENS
        return Plane(self.geometry.k_heads, slot_words, slots)

    @cached_property
    def unit_words(self) -> int:
        return gcd(*(plane.slot_words for plane in (*self.planes, self.summaries) if plane))

    @cached_property
    def summaries_at(self) -> int:
        """The first word of the summaries within a page, or the end of a page without them."""
        return sum(plane.words for plane in self.planes)

    @cached_property
    def page_words(self) -> int:
        return self.summaries_at + (self.summaries.words if self.summaries else 0)

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

    @cached_property
    def begins(self) -> Begins:
        """The first words of the planes that kernels find by name."""
        first = self.page_format.key_planes(self.geometry)
        # Floats have no scales: what is there instead is not read.
        centres = self.offsets[first - 1] if self.page_format.keys.is_centred else 0
        return Begins(self.offsets[1], centres, self.offsets[first], self.offsets[-1])

    def page(self, encoded: Sequence[mx.array]) -> mx.array:
        """A whole page, uint16 [page_units, unit_words], of the words of each plane
        [1, heads, slots, slot_words], and of the summaries, if it has some."""
        whole = mx.concatenate([plane.reshape(-1) for plane in encoded])
        return whole.reshape(-1, self.unit_words)

    def numbers(self, page: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, 256, dim] of a whole page, uint16 [page_units, unit_words]."""
        words = page.reshape(-1)
        encoded = [
            words[first : first + plane.words].reshape(
                1, plane.heads, plane.slots, plane.slot_words
            )
            for first, plane in zip(self.offsets, self.planes, strict=True)
        ]
        return self.page_format.decode(self.geometry, encoded)

    def recoded(self, page: mx.array, other: "PageLayout") -> mx.array:
        """A whole page of this layout in another one of the same keys and values."""
        words = page.reshape(-1)
        encoded = [words[: self.summaries_at]]
        if self.page_format != other.page_format:
            encoded = list(other.page_format.encode(*self.numbers(page)))
        if other.summaries is not None:
            kept = words[self.summaries_at :]
            encoded.append(kept if kept.size else summaries_of(self.numbers(page)[0]).view(WORD))
        return other.page(encoded)


def summaries_of(keys: mx.array) -> mx.array:
    """Summaries, float16 [..., tokens / 32, 2 * dim], of keys [..., tokens, dim]: first the means,
    then the variances.

    With them, a step can tell which tokens matter without reading them. If the keys of a run are
    normally distributed around their mean m, with variances v, the mean of exp(q k) over them is
    exp(q m + q^2 v / 2): the weight that a query q gives to the run. A key that varies by more than
    float16 holds matters to every query.
    """
    groups = mx.unflatten(keys.astype(mx.float32), -2, (-1, RUN_TOKENS))
    means = groups.mean(axis=-2)
    variances = mx.square(groups - means[..., None, :]).mean(axis=-2)
    return mx.clip(mx.concatenate([means, variances], axis=-1), -MOST, MOST).astype(mx.float16)
