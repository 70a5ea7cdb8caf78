"""Number formats: how a page holds the numbers of a token's keys or values.

A number format turns the numbers of a page's tokens in one head into 16-bit words, some for each
plane that it needs, and back. Formats of the page that is written encode each token alone, so that
it fills token by token.

Formats of codes rotate the head dimension first, which spreads outliers over all numbers of a
token. A few channels of keys are often far larger than the others. One scale for 64 numbers of 4
bits then leaves few codes for the others: signal to noise falls from 20 dB to 13. With rotation it
is 22 dB. Rotated queries have the same products with rotated keys, and a weighted sum of rotated
values is the rotated sum. So only outputs are rotated back.

Keys of 5 bits are held relative to their centre, the mean of a page's keys. It has more than half
of the energy of keys, and what is left has as much less noise in codes. Of values it has a sixth,
and centres would gain nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple, Protocol

import mlx.core as mx

WORD = mx.uint16
GROUP = 32  # numbers whose codes lie together; head sizes of codes divide by it
MOST = 65504.0  # the largest float16
CENTRE_PARTS = 4  # sums of tokens whose sum is a centre
LEAST = 2.0**-126  # the smallest float32 of full precision


class Encoding(NamedTuple):
    """The encoding of one number, and its names in kernels.

    Attributes:
        name: in kernels/cpu/paged_kv_cpu.h it is PAGED_KV_name.
        bits: of a number, without its part of a scale.
        cpu: the value of that constant.
        gpu_name: in kernels/gpu/pages.h. HAS_gpu_name says that a kernel is made for it. Kernels
            know the model's dtype, so one name does for all floats.
        gpu: the value of that constant.
        group: the most numbers that share a scale, a power of 2; 0 if none do.
    """

    name: str
    bits: int
    cpu: int
    gpu_name: str
    gpu: int
    group: int = 0

    def scales(self, dim: int) -> int:
        """Scales of a token's `dim` codes in a head: 64 numbers have one of 64, 96 have three."""
        return dim // gcd(dim, self.group)


FLOATS = {
    mx.float32: Encoding("F32", 32, cpu=0, gpu_name="FLOATS", gpu=16),
    mx.float16: Encoding("F16", 16, cpu=1, gpu_name="FLOATS", gpu=16),
    mx.bfloat16: Encoding("BF16", 16, cpu=2, gpu_name="FLOATS", gpu=16),
}
CODES = {
    8: Encoding("Q8", 8, cpu=3, gpu_name="Q8", gpu=8, group=GROUP),
    4: Encoding("Q4", 4, cpu=4, gpu_name="Q4", gpu=4, group=64),
    5: Encoding("Q5", 5, cpu=5, gpu_name="Q5", gpu=5, group=128),
}


class NumberFormat(Protocol):
    """A format of keys, or of values."""

    @property
    def name(self) -> str: ...

    @property
    def is_centred(self) -> bool:
        """Whether numbers are held relative to their page's centre. It is the last plane, which has
        one slot of `dim` words for all tokens of a page."""
        ...

    @property
    def first(self) -> "NumberFormat":
        """The format of the same numbers in a sequence's first page: see `PageFormat.first`."""
        ...

    def encoding(self, dtype: mx.Dtype) -> Encoding:
        """How numbers of the model's `dtype` lie in a slot.

        Raises:
            ValueError: the format cannot hold them.
        """
        ...

    def slot_words(self, dim: int, dtype: mx.Dtype) -> tuple[int, ...]:
        """Words of a token's slot in each plane, for `dim` numbers of the model's `dtype`.

        Raises:
            ValueError: the format cannot hold such numbers.
        """
        ...

    def encode(self, numbers: mx.array) -> tuple[mx.array, ...]:
        """Words of each plane, uint16 [..., tokens, slot_words], and of a centre [..., 1, dim], for
        a page's numbers [..., tokens, dim]."""
        ...

    def decode(self, encoded: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """Numbers [..., tokens, dim] of the words of each plane, in the model's dtype: of several
        pages with their centres [..., pages, dim], or of tokens each with that of its page."""
        ...


@dataclass(frozen=True)
class SixteenBit:
    """The model's own numbers, bit for bit: float16 or bfloat16, and float32 for tests."""

    name = "fp16"
    is_centred = False

    @property
    def first(self) -> NumberFormat:
        return self

    def encoding(self, dtype: mx.Dtype) -> Encoding:
        _require_floats(self.name, dtype)
        return FLOATS[dtype]

    def slot_words(self, dim: int, dtype: mx.Dtype) -> tuple[int, ...]:
        return (dim * self.encoding(dtype).bits // 16,)

    def encode(self, numbers: mx.array) -> tuple[mx.array, ...]:
        return (numbers.view(WORD),)

    def decode(self, encoded: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        return encoded[0].view(dtype)


@dataclass(frozen=True)
class Quantised:
    """Codes of 4, 5 or 8 bits that share float16 scales, much as llama.cpp's q4_0, q5_0 and q8_0.

    A number is code * scale, in the basis of `rotate`. All steps are in float32. A group is those
    that share a scale: 32 numbers of 8 bits, 64 of 4, 128 of 5; half as many, or a quarter, where
    the head size does not divide by that.

    8 bits: the scale is the largest magnitude over 127. A code is floor(number * (1 / scale) +
    0.5), clipped to -127 and 127.

    4 or 5 bits, with n = 8 or 16: a first scale is the number of largest magnitude (the one below
    0, where there are two) over -n. A code is floor(number * (1 / scale) + n + 0.5), clipped to 0
    and 2n - 1, less n. The scale is then refitted to the codes by least squares: the sum of
    code * number times 1 over the sum of code squared.

    Where a scale is nearer to 0 than 2^-126, or that sum is 0, 1 / x is 0 instead. Scales are
    clipped to the largest float16 and rounded to nearest, ties to even.

    To try more first scales, as make_qx_quants of llama.cpp does, gains 0.3 dB of 20 with three
    of them. But which is best then turns on the last bits of numbers: when the embedding of
    stdlib-llama changes by 1e-6, log-probabilities move by 0.1 to 0.4, and mostly not at all so.

    Planes: codes, then scales, then the centre if there is one. Codes of 8 bits are signed bytes.
    The others lie by 32 numbers, n added: the lower 4 bits of code j are the low half of byte j for
    j < 16, else the high half of byte j - 16. The fifth bits are before the scales, a word of 32
    bits for 32 numbers: bit 8 * (j % 4) + j // 4 is of code j. So bits of a word of codes are a
    shift and a mask away.

    Keys of 5 bits have a centre, float16 [dim], in the basis of the codes, and what is coded are
    the differences from it. It is `centre` of a page, rotated and rounded as scales are; 0 where
    float16 does not hold that, so that a token that is not finite spoils no other.

    Attributes:
        bits: of a code. Keys of 5 and values of 4 are those of `q4`.
    """

    bits: int

    @property
    def is_centred(self) -> bool:
        return self.bits == 5

    @property
    def _middle(self) -> int:
        """What is added to codes of 4 or 5 bits."""
        return 1 << self.bits - 1

    @property
    def name(self) -> str:
        return "q8" if self.bits == 8 else "q4"

    @property
    def first(self) -> NumberFormat:
        return Quantised(8)

    def encoding(self, dtype: mx.Dtype) -> Encoding:
        _require_floats(self.name, dtype)
        return CODES[self.bits]

    def slot_words(self, dim: int, dtype: mx.Dtype) -> tuple[int, ...]:
        scales = self.encoding(dtype).scales(dim)
        if dim % GROUP:
            raise ValueError(
                f"page_format {self.name!r} needs head sizes that divide by {GROUP}, got {dim}: "
                "use 'fp16' for this model"
            )
        fifths = dim // 16 if self.bits == 5 else 0
        return dim * self.bits // 16 - fifths, fifths + scales

    def encode(self, numbers: mx.array) -> tuple[mx.array, ...]:
        if not numbers.shape[-1]:
            return (numbers.view(WORD),) * (3 if self.is_centred else 2)
        floats = numbers.astype(mx.float32)
        centres = (self._centre(floats),) if self.is_centred else ()
        floats = rotate(floats)
        if centres:
            floats = floats - centres[0].astype(mx.float32)
        groups = mx.unflatten(floats, -1, (CODES[self.bits].scales(floats.shape[-1]), -1))
        codes, scales = _q8(groups) if self.bits == 8 else _fitted(groups, self._middle)
        codes = mx.flatten(codes, -2)
        scales = mx.clip(scales, -MOST, MOST).astype(mx.float16)
        if self.bits < 8:
            codes, fifths = _packed(codes)
        if self.bits == 5:
            scales = mx.concatenate([fifths, scales.view(WORD)], axis=-1)
        return tuple(plane.view(WORD) for plane in (codes, scales, *centres))

    def decode(self, encoded: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        codes, scales, *centres = encoded
        if not codes.shape[-1]:
            return codes.view(dtype)
        if self.bits == 8:
            codes = codes.view(mx.int8)
        else:
            fifths = codes.shape[-1] // 4 if self.bits == 5 else 0
            codes = unpacked(codes, scales[..., :fifths]) - self._middle
            scales = scales[..., fifths:]
        numbers = mx.unflatten(codes, -1, (scales.shape[-1], -1))
        numbers = numbers * scales.view(mx.float16).astype(mx.float32)[..., None]
        numbers = mx.flatten(numbers, -2)
        if centres:
            rows = centres[0].view(mx.float16).astype(mx.float32)
            numbers = numbers + mx.repeat(rows, numbers.shape[-2] // rows.shape[-2], axis=-2)
        return rotate(numbers).astype(dtype)

    def _centre(self, floats: mx.array) -> mx.array:
        """The centre of a page, float16 [..., 1, dim]."""
        mean = rotate(centre(floats))
        return mx.where(mx.abs(mean) <= MOST, mean, 0).astype(mx.float16)


# By the names that users give them.
KEY_FORMATS: dict[str, NumberFormat] = {
    each.name: each for each in (SixteenBit(), Quantised(8), Quantised(5))
}
VALUE_FORMATS: dict[str, NumberFormat] = KEY_FORMATS | {"q4": Quantised(4)}


def _require_floats(name: str, dtype: mx.Dtype) -> None:
    if dtype not in FLOATS:
        raise ValueError(f"page_format {name!r} holds float16, bfloat16 or float32, got {dtype}")


def _fitted(groups: mx.array, n: int) -> tuple[mx.array, mx.array]:
    """Codes [..., group], `n` added, and scales."""
    high, low = mx.max(groups, -1, keepdims=True), mx.min(groups, -1, keepdims=True)
    largest = mx.where(high > -low, high, low)
    codes = mx.clip(mx.floor(groups * _inverse(largest / -n) + (n + 0.5)), 0, 2 * n - 1) - n
    squares = mx.sum(codes * codes, -1)
    # In an order that all backends keep.
    parts = mx.sum(mx.unflatten(codes * groups, -1, (-1, GROUP)), -1)
    products = parts[..., 0]
    for part in range(1, parts.shape[-1]):
        products = products + parts[..., part]
    return (codes + n).astype(mx.uint8), products * _inverse(squares)


_FIFTHS = mx.array([8 * (j % 4) + j // 4 for j in range(GROUP)], mx.uint32)


def _packed(codes: mx.array) -> tuple[mx.array, mx.array]:
    """Words of the lower 4 bits of codes [..., dim], and of their fifth bits."""
    groups = mx.unflatten(codes, -1, (-1, GROUP))
    lower = groups & 15
    lower = lower[..., : GROUP // 2] | (lower[..., GROUP // 2 :] << 4)
    fifths = mx.sum((groups >> 4).astype(mx.uint32) << _FIFTHS, -1)
    return mx.flatten(lower, -2).view(WORD), fifths.view(WORD)


def unpacked(lower: mx.array, fifths: mx.array) -> mx.array:
    """Codes int8 [..., dim] of these words; without fifth bits they have 4."""
    halves = mx.unflatten(lower.view(mx.uint8), -1, (-1, GROUP // 2))
    codes = mx.concatenate([halves & 15, halves >> 4], axis=-1)
    if fifths.shape[-1]:
        bits = (mx.contiguous(fifths).view(mx.uint32)[..., None] >> _FIFTHS) & 1
        codes = codes | (bits << 4).astype(mx.uint8)
    return mx.flatten(codes.astype(mx.int8), -2)


def _q8(groups: mx.array) -> tuple[mx.array, mx.array]:
    """Signed bytes [..., 32] of codes, and scales."""
    scales = mx.max(mx.abs(groups), -1) / 127
    codes = mx.floor(groups * _inverse(scales)[..., None] + 0.5)
    return mx.clip(codes, -127, 127).astype(mx.int8), scales


def _inverse(scales: mx.array) -> mx.array:
    """1 / scale; 0 for a group of nothing that float16 could hold, whose codes are all 0."""
    return mx.where(mx.abs(scales) < LEAST, 0.0, 1 / scales)


def centre(numbers: mx.array) -> mx.array:
    """The mean [..., 1, dim] of a page's numbers [..., tokens, dim], in float32.

    Tokens are added in an order that all backends keep, as codes turn on the last bits of numbers:
    every `CENTRE_PARTS`-th one after the other, and then these parts.
    """
    tokens = numbers.shape[-2]
    padding = [(0, 0)] * (numbers.ndim - 2) + [(0, -tokens % CENTRE_PARTS), (0, 0)]
    rows = mx.pad(numbers, padding)
    parts = rows[..., :CENTRE_PARTS, :]
    for first in range(CENTRE_PARTS, tokens, CENTRE_PARTS):
        parts = parts + rows[..., first : first + CENTRE_PARTS, :]
    total = parts[..., :1, :]
    for part in range(1, CENTRE_PARTS):
        total = total + parts[..., part : part + 1, :]
    return total / tokens


def block_size(dim: int) -> int:
    """How many numbers are rotated together."""
    return dim & -dim


def rotate(vectors: mx.array) -> mx.array:
    """Rotate vectors [..., dim], or rotate them back.

    The rotation is the Hadamard transform, scaled to be orthogonal, of blocks of the head
    dimension. The block size is the largest power of 2 that divides it. The transform is its own
    inverse.
    """
    blocks = mx.unflatten(vectors, -1, (-1, block_size(vectors.shape[-1])))
    return mx.flatten(mx.hadamard_transform(blocks), -2)
