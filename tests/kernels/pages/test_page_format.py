"""The bytes of a page: the model's numbers bit for bit, one plane after the other."""

from math import prod

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.number_format import KEY_FORMATS, WORD
from paged_kv.kernels.pages.page_format import (
    FP16,
    PageLayout,
    Plane,
    page_format_named,
)
from tests.support.examples import examples

Words = npt.NDArray[np.uint16]
Part = tuple[int, int, mx.Dtype]  # Heads, head size, dtype.

DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def geometry(keys: Part, values: Part) -> LayerGeometry:
    return LayerGeometry(*keys, *values)


def words(array: mx.array) -> Words:
    """The bits of an array, so that NaNs can be compared."""
    return np.asarray(array.view(WORD))


def any_bits(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Numbers of any bit pattern: subnormals, infinities and NaNs among them."""
    size = prod(shape) * dtype.size // WORD.size
    bits = np.random.default_rng(seed).integers(0, 1 << 16, size, dtype=np.uint16)
    return mx.array(bits).view(dtype).reshape(shape)


def round_trip(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    page_format = FP16
    encoded = page_format.encode(keys, values)
    return page_format.decode(LayerGeometry.of(keys, values), encoded)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_every_bit_pattern_of_16_bits_comes_back(dtype: mx.Dtype) -> None:
    every = mx.arange(1 << 16, dtype=mx.uint16)
    keys = every.view(dtype).reshape(1, 4, 256, 64)
    for found in round_trip(keys, keys):
        assert (found.dtype, found.shape) == (dtype, keys.shape)
        assert (words(found).reshape(-1) == np.arange(1 << 16)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_that_are_not_contiguous_are_encoded_by_their_numbers(dtype: mx.Dtype) -> None:
    """Models pass transposed projections. Keys and values may differ in heads, size and dtype."""
    for axes in ((0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)):
        keys = any_bits((3, 4, 6, 8), dtype).transpose(axes)
        values = mx.broadcast_to(any_bits((1, 1, 1, 20), mx.bfloat16), (*keys.shape[:3], 20))[:, :1]
        planes = FP16.encode(keys, values)
        assert (np.asarray(planes[0]) == words(mx.contiguous(keys))).all()
        assert (np.asarray(planes[1]) == words(mx.contiguous(values))).all()
        # Rows with and without a batch.
        geometry = LayerGeometry.of(keys, values)
        for at in (slice(None), 1):
            found = FP16.decode(geometry, [plane[at] for plane in planes])
            for part, given_ in zip(found, (keys, values), strict=True):
                assert part.dtype == given_.dtype
                assert (words(part) == words(mx.contiguous(given_[at]))).all()


def test_layout_of_a_page() -> None:
    held = geometry((1, 16, mx.float32), (3, 24, mx.float16))
    assert FP16.planes(held) == (Plane(1, 32), Plane(3, 24))
    layout = PageLayout(FP16, held)
    assert (layout.unit_words, layout.page_bytes, layout.offsets) == (8, 53_248, (0, 8_192))
    without_values = geometry((1, 576, mx.float16), (1, 0, mx.float16))
    assert PageLayout(FP16, without_values).unit_words == 576
    assert PageLayout(FP16, without_values).page_bytes == 576 * 256 * 2


@examples(40)
@given(
    heads=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    groups=st.tuples(st.integers(1, 19), st.integers(1, 19)),
    formats=st.tuples(*[st.sampled_from(sorted(KEY_FORMATS))] * 2),
)
def test_planes_follow_each_other_and_every_slot_is_whole_units(
    heads: tuple[int, int], groups: tuple[int, int], formats: tuple[str, str]
) -> None:
    held = geometry((heads[0], 32 * groups[0], mx.float16), (heads[1], 32 * groups[1], mx.bfloat16))
    layout = PageLayout(page_format_named(formats), held)
    parts = [(plane.heads, plane.slot_words) for plane in layout.planes]
    end = 0
    for plane, offset in zip(layout.planes, layout.offsets, strict=True):
        assert offset == end
        assert offset % layout.unit_words == plane.slot_words % layout.unit_words == 0
        end += plane.heads * plane.slots * plane.slot_words
    assert layout.page_words == layout.page_units * layout.unit_words == end
    longer_units = range(layout.unit_words + 1, min(slot_words for _, slot_words in parts) + 1)
    assert not any(all(words % unit == 0 for _, words in parts) for unit in longer_units)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint16, mx.bool_, mx.complex64])
def test_dtypes_that_are_not_held_are_refused_for_keys_and_for_values(dtype: mx.Dtype) -> None:
    good = (2, 64, mx.float16)
    for refused in (geometry((2, 64, dtype), good), geometry(good, (2, 64, dtype))):
        with pytest.raises(ValueError, match=str(dtype)):
            FP16.planes(refused)


@pytest.mark.parametrize("name", ["q3", "", "FP16", " fp16"])
def test_an_unknown_name_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is no page format: there are 'fp16',"):
        page_format_named(name)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("q4", "q8"),
        ("q8/q4", "q8"),
        ("fp16/q4", "fp16/q8"),
        *[(name, name) for name in ("fp16", "q8", "q8/fp16")],
    ],
)
def test_the_first_page_has_8_bits_instead_of_4(name: str, first: str) -> None:
    assert page_format_named(name).first == page_format_named(first)
    assert page_format_named(name).first.name == first
