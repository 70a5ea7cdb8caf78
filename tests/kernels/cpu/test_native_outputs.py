"""The outputs of native kernels on each instruction set: they share memory with no other array, and
are right where later keys outweigh earlier ones, with NaN and infinity, with numbers outside 16
bits, and for pages in another format.

Most tests loop over their cases: a fault of one instruction set shows in only a few of them.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.cpu.native_backend import COPIED_BYTES, NativeBackend
from paged_kv.kernels.cpu.native_library import thread_count
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import WORD, rotate
from paged_kv.kernels.pages.page_format import LayerGeometry, page_format_named
from tests.support.arrays import normal, numbers
from tests.support.backends import instruction_sets, native_library
from tests.support.dense_attention import dense_attention
from tests.support.page_numbers import holding

# Head sizes of whole registers of every instruction set.
HEADS, DIM = 2, 96
ROWS = AttentionMetadata(((0,),), (256,), (0,))
COPIED = AttentionMetadata(((64,),), (256,), (0,))
CODES = ("q8", "q4")
# Two NaNs whose last bits would carry into the sign if a kernel rounded them like numbers.
NANS = (0x7FFF, 0xFFFF, 0x7C01, 0x7E00)


@pytest.fixture(params=instruction_sets())
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    library = native_library()
    library.use_instruction_set(request.param)
    return NativeBackend(library)


def pages_of(backend: NativeBackend, dtype: mx.Dtype, *names: str, dim: int = DIM) -> LayerPages:
    """A page of each format, each the first of its own slab."""
    pages = LayerPages(LayerGeometry(HEADS, dim, dtype, HEADS, dim, dtype), backend, 64)
    for slab, name in enumerate(names):
        pages.map_slab(slab, 1, page_format_named(name))
    return pages


def step(dtype: mx.Dtype, seed: int) -> mx.array:
    return normal((1, HEADS, 256, DIM), dtype, seed)


def test_nan_in_a_page_is_nan_in_its_copy_of_16_bits(backend: NativeBackend) -> None:
    """Whatever the NaN's bits are. Codes other than 0 have a scale of NaN."""
    for name, bits, dtype in product(CODES, NANS, (mx.float32, mx.float16, mx.bfloat16)):
        pages = pages_of(backend, dtype, name, "fp16")
        words = np.full(pages.page(0).shape, 0x1111, np.uint16).reshape(-1)
        layout = pages.layout_of(0)
        for plane in (1, -1):  # scales
            first = layout.offsets[plane]
            words[first : first + layout.planes[plane].words] = bits
        pages.load({0: mx.array(words.reshape(pages.page(0).shape), WORD)})
        pages.copy({0: 64})
        for part in pages.gather(COPIED):
            assert np.isnan(numbers(part)).all(), (name, hex(bits), dtype)


def test_a_copy_of_16_bits_is_rounded_as_mlx_rounds(backend: NativeBackend) -> None:
    """What codes stand for has more bits than the dtype: it rounds to nearest, ties to even.

    Scales and centres are small multiples of 1/64, so that 64 numbers are rotated exactly.
    """
    for name, dtype in product(CODES, (mx.float16, mx.bfloat16)):
        pages = pages_of(backend, dtype, name, "fp16", dim=64)
        layout, random = pages.layout_of(0), np.random.default_rng(1)
        words = random.integers(0, 1 << 16, layout.page_words, np.uint16)
        for plane in {1, -1, layout.page_format.key_planes(pages.geometry) - 1}:
            halves = words[layout.offsets[plane] :][: layout.planes[plane].words].view(np.float16)
            halves[:] = random.integers(-255, 256, halves.shape) / 64
        pages.load({0: mx.array(words.reshape(pages.page(0).shape))})
        pages.copy({0: 64})
        for ours, lazy in zip(pages.gather(COPIED), pages.gather(ROWS), strict=True):
            assert mx.array_equal(ours.view(WORD), lazy.view(WORD)), (name, dtype)


def test_a_query_that_is_no_number_gives_none(backend: NativeBackend) -> None:
    """The numbers beside it keep their values."""
    for name, queries in product(("fp16", *CODES), (1, 40)):
        pages = pages_of(backend, mx.float16, name)
        keys, values = mx.abs(step(mx.float16, 1)) + 1, step(mx.float16, 2)
        pages.load(holding(pages, keys, values, ROWS))
        for number in (np.inf, -np.inf, np.nan):
            asked = normal((1, 2 * HEADS, queries, DIM), mx.float16, 3)
            # Infinity times numbers of both signs.
            asked[0, 1, queries // 2, :2] = mx.array([number, -number])
            is_nan = np.isnan(numbers(pages.attend(asked, ROWS, Attention(0.1)))[0])
            assert is_nan[1, queries // 2].all(), (name, queries, number)
            assert is_nan.sum() == DIM, (name, queries, number)


# One thread reads a sequence of so many heads as a whole; with fewer heads each page would be a
# task.
MANY_HEADS, LENGTH = 8, 700
LONG = AttentionMetadata(((0, 1, 2),), (LENGTH,), (0,))


def written(isa: str, keys: mx.array, values: mx.array, name: str = "fp16") -> LayerPages:
    library = native_library()
    library.use_instruction_set(isa)
    geometry = LayerGeometry(MANY_HEADS, 64, mx.float32, MANY_HEADS, 64, mx.float32)
    pages = LayerPages(geometry, NativeBackend(library), 64)
    pages.map_slab(0, 3, page_format_named(name))
    pages.load(holding(pages, keys, values, LONG))
    return pages


def floats(count: int, seed: int) -> mx.array:
    return normal((1, MANY_HEADS, count, 64), mx.float32, seed)


@pytest.mark.parametrize("queries", [1, 3, COPIED_BYTES // 64 // MANY_HEADS // 4 + 1])
def test_an_output_stays_what_it_is_when_others_are_made(queries: int) -> None:
    """Outputs of the same shape, small and large."""
    pages = written(instruction_sets()[0], floats(LENGTH, 1), floats(LENGTH, 2))
    asked = [floats(queries, seed) for seed in (3, 4)]
    outputs = [pages.attend(each, LONG, Attention(0.2)) for each in asked * 2]
    for one, again in zip(outputs[:2], outputs[2:], strict=True):
        assert mx.array_equal(one, again)
    assert not mx.array_equal(outputs[0], outputs[1])


@pytest.fixture
def _one_thread() -> Iterator[None]:
    native_library().use_threads(1)
    yield
    native_library().use_threads(thread_count())


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.slow
def test_sums_follow_the_largest_logit(isa: str) -> None:
    """The logits grow page by page, or none of the later ones comes near the first. Rotated, keys
    and queries are the same."""
    four = mx.array([1.0, 1.0, 1.0, -1.0])
    signs = mx.flatten(four[:, None, None] * four[:, None] * four)
    assert mx.array_equal(rotate(signs), signs)
    # Logits from 0 to 7.
    rising = mx.arange(LENGTH)[:, None] / 100 / 64
    for name, queries, growth in product(("fp16", "q8"), (1, 3, 100), (rising, rising[::-1])):
        asked = mx.broadcast_to(signs, (1, MANY_HEADS, queries, 64))
        keys = mx.broadcast_to(signs * growth, (1, MANY_HEADS, LENGTH, 64))
        pages = written(isa, keys, floats(LENGTH, 2), name)
        found = numbers(pages.attend(asked, LONG, Attention(1.0)))[0]
        held = (numbers(part)[0] for part in pages.gather(LONG))
        options: dict[str, Any] = {"scale": 1.0, "causal": True, "window": None, "sinks": None}
        expected = dense_attention(numbers(asked)[0], *held, **options)
        assert np.abs(found - expected).max() < 1e-4, (name, queries)
