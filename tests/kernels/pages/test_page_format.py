"""The bytes of a page: the model's numbers bit for bit, one plane after the other."""

from math import prod

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.number_format import KEY_FORMATS, WORD, SixteenBit
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


@pytest.mark.parametrize("k_dtype", DTYPES)
@pytest.mark.parametrize("v_dtype", DTYPES)
def test_keys_and_values_may_differ_in_heads_size_and_dtype(
    k_dtype: mx.Dtype, v_dtype: mx.Dtype
) -> None:
    keys = any_bits((2, 3, 5, 48), k_dtype, seed=1)
    values = any_bits((2, 1, 5, 20), v_dtype, seed=2)
    encoded = FP16.encode(keys, values)
    planes = FP16.planes(LayerGeometry.of(keys, values))
    for held, plane in zip(encoded, planes, strict=True):
        assert (held.dtype, held.shape) == (mx.uint16, (2, plane.heads, 5, plane.slot_words))
    for found, given_ in zip(round_trip(keys, values), (keys, values), strict=True):
        assert (found.dtype, found.shape) == (given_.dtype, given_.shape)
        assert (words(found) == words(given_)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)])
def test_arrays_that_are_not_contiguous_are_encoded_by_their_numbers(
    dtype: mx.Dtype, axes: tuple[int, int, int, int]
) -> None:
    """Models pass transposed projections."""
    keys = any_bits((3, 4, 6, 8), dtype).transpose(axes)
    values = mx.broadcast_to(any_bits((1, 1, 1, 8), dtype), (*keys.shape[:3], 8))
    encoded_keys, encoded_values = FP16.encode(keys, values)
    assert (np.asarray(encoded_keys) == words(mx.contiguous(keys))).all()
    assert (np.asarray(encoded_values) == words(mx.contiguous(values))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_takes_rows_with_and_without_a_batch(dtype: mx.Dtype) -> None:
    keys, values = any_bits((2, 3, 5, 16), dtype), any_bits((2, 3, 5, 8), dtype)
    planes = FP16.encode(keys, values)
    one = [plane[1] for plane in planes]
    found, _ = FP16.decode(LayerGeometry.of(keys, values), one)
    assert found.shape == (3, 5, 16)
    assert (words(found) == words(keys[1])).all()


@pytest.mark.parametrize(
    ("keys", "values", "slot_words", "unit_words", "page_bytes", "values_at"),
    [
        ((2, 64, mx.float16), (2, 64, mx.float16), (64, 64), 64, 131_072, 32_768),
        ((2, 192, mx.bfloat16), (2, 128, mx.bfloat16), (192, 128), 64, 327_680, 98_304),
        ((1, 96, mx.float32), (1, 96, mx.float32), (192, 192), 192, 196_608, 49_152),
        ((1, 16, mx.float32), (3, 24, mx.float16), (32, 24), 8, 53_248, 8_192),
        ((1, 576, mx.float16), (1, 0, mx.float16), (576, 0), 576, 294_912, 147_456),
    ],
)
def test_layout_of_a_page(
    keys: Part,
    values: Part,
    slot_words: tuple[int, int],
    unit_words: int,
    page_bytes: int,
    values_at: int,
) -> None:
    planes = FP16.planes(geometry(keys, values))
    assert planes == (Plane(keys[0], slot_words[0]), Plane(values[0], slot_words[1]))
    layout = PageLayout(FP16, geometry(keys, values))
    assert layout.unit_words == unit_words
    assert (layout.page_bytes, layout.page_words) == (page_bytes, page_bytes // 2)
    assert layout.page_units == page_bytes // 2 // unit_words
    assert layout.offsets == (0, values_at)


@examples(100)
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


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint16, mx.uint8, mx.bool_, mx.complex64])
def test_dtypes_that_are_not_held_are_refused_for_keys_and_for_values(dtype: mx.Dtype) -> None:
    good = (2, 64, mx.float16)
    message = f"page_format 'fp16' holds float16, bfloat16 or float32, got {dtype}"
    for refused in (geometry((2, 64, dtype), good), geometry(good, (2, 64, dtype))):
        with pytest.raises(ValueError, match=message):
            FP16.planes(refused)


def test_a_format_is_found_by_its_name() -> None:
    assert isinstance(page_format_named("fp16").keys, SixteenBit)
    assert page_format_named("fp16").name == "fp16"


@pytest.mark.parametrize("name", ["q3", "", "FP16", " fp16"])
def test_an_unknown_name_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' is no page format: there are 'fp16',"):
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
