"""The bytes of a page: the model's numbers bit for bit, one plane after the other."""

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import (
    FP16,
    LayerGeometry,
    PageLayout,
    Plane,
    page_format_named,
)


def round_trip(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    return FP16.decode(LayerGeometry.of(keys, values), FP16.encode(keys, values))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_every_bit_pattern_of_16_bits_comes_back(dtype: mx.Dtype) -> None:
    every = mx.arange(1 << 16, dtype=mx.uint16)
    keys = every.view(dtype).reshape(1, 4, 256, 64)
    for found in round_trip(keys, keys):
        assert (found.dtype, found.shape) == (dtype, keys.shape)
        assert (np.asarray(found.view(WORD)).reshape(-1) == np.arange(1 << 16)).all()


def test_layout_of_a_page() -> None:
    held = LayerGeometry(1, 16, mx.float32, 3, 24, mx.float16)
    assert FP16.planes(held) == (Plane(1, 32), Plane(3, 24))
    layout = PageLayout(FP16, held)
    assert (layout.unit_words, layout.page_bytes, layout.offsets) == (8, 53_248, (0, 8_192))
    without_values = LayerGeometry(1, 576, mx.float16, 1, 0, mx.float16)
    assert PageLayout(FP16, without_values).unit_words == 576
    assert PageLayout(FP16, without_values).page_bytes == 576 * 256 * 2


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
