"""What the native kernels make of NaN, of infinity, and of numbers that 16 bits do not hold."""

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.layer_geometry import LayerGeometry
from paged_kv.kernels.layer_pages import LayerPages
from paged_kv.kernels.native_backend import NativeBackend
from paged_kv.kernels.number_format import WORD
from paged_kv.kernels.page_format import page_format_named
from paged_kv.kernels.page_rows import PageRows
from tests.arrays import normal, numbers
from tests.backends import instruction_sets, native_library

# Head sizes of whole registers of every instruction set.
HEADS, DIM = 2, 96
ROWS = PageRows(((0,),), (256,), (0,))
# Two of NaN whose last bits carry on into the sign when they are rounded as if they were a number.
NANS = [0x7FFF, 0xFFFF, 0x7C01, 0x7E00]


@pytest.fixture(params=instruction_sets())
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    library = native_library()
    library.use_instruction_set(request.param)
    return NativeBackend(library)


def pages_of(backend: NativeBackend, name: str, dtype: mx.Dtype) -> LayerPages:
    """One page."""
    pages = LayerPages(LayerGeometry(HEADS, DIM, dtype, HEADS, DIM, dtype), backend, 64)
    pages.map_slab(0, 1, page_format_named(name))
    return pages


@pytest.mark.parametrize("bits", NANS)
@pytest.mark.parametrize("name", ["q8-unrotated", "q4-unrotated"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_nan_in_a_page_is_nan_in_what_is_gathered(
    backend: NativeBackend, name: str, bits: int, dtype: mx.Dtype
) -> None:
    """Whatever its bits are. Codes that are not 0 have a scale of NaN."""
    pages = pages_of(backend, name, dtype)
    words = np.full(pages.page(0).shape, 0x1111, np.uint16).reshape(-1)
    layout = pages.layout_of(0)
    for plane in (1, 3):
        first = layout.offsets[plane]
        words[first : first + layout.planes[plane].words] = bits
    pages.load({0: mx.array(words.reshape(pages.page(0).shape), WORD)})
    for part in backend.gather_now(pages, ROWS):
        assert np.isnan(numbers(part)).all()


@pytest.mark.parametrize("name", ["q8-unrotated", "q4-unrotated"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_what_is_gathered_is_rounded_as_mlx_rounds(
    backend: NativeBackend, name: str, dtype: mx.Dtype
) -> None:
    """Code times scale has more bits than the dtype: to the nearest, ties to even."""
    pages = pages_of(backend, name, dtype)
    keys, values = (normal((1, HEADS, 256, DIM), dtype, seed) for seed in (1, 2))
    pages.write(keys, values, ROWS)
    for ours, lazy in zip(backend.gather_now(pages, ROWS), pages.gather(ROWS), strict=True):
        assert mx.array_equal(ours.view(WORD), lazy.view(WORD))


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["fp16", "q8", "q4", "q4-unrotated"])
def test_a_query_that_is_no_number_gives_none(
    backend: NativeBackend, name: str, number: float, queries: int
) -> None:
    """And leaves those beside it alone."""
    pages = pages_of(backend, name, mx.float16)
    keys, values = (normal((1, HEADS, 256, DIM), mx.float16, seed) for seed in (1, 2))
    pages.write(mx.abs(keys) + 1, values, ROWS)
    asked = normal((1, 2 * HEADS, queries, DIM), mx.float16, 3)
    # Infinity times numbers of both signs.
    asked[0, 1, queries // 2, :2] = mx.array([number, -number])
    found = numbers(pages.attend(asked, ROWS, scale=0.1))[0]
    is_nan = np.isnan(found)
    assert is_nan[1, queries // 2].all()
    assert is_nan.sum() == DIM
