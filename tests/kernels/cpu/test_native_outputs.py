"""The outputs of native kernels: they share memory with no other array, and are right where later
keys outweigh earlier ones."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.cpu.native_backend import COPIED_BYTES, NativeBackend
from paged_kv.kernels.cpu.native_library import thread_count
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import rotate
from paged_kv.kernels.pages.page_format import page_format_named
from tests.support.arrays import normal, numbers
from tests.support.backends import instruction_sets, native_library
from tests.support.dense_attention import dense_attention
from tests.support.page_numbers import holding

# One thread reads a sequence of so many heads as a whole; with fewer heads each page would be a
# task.
HEADS, DIM, LENGTH = 8, 64, 700
ROWS = AttentionMetadata(((0, 1, 2),), (LENGTH,), (0,))


def written(isa: str, keys: mx.array, values: mx.array, name: str = "fp16") -> LayerPages:
    library = native_library()
    library.use_instruction_set(isa)
    geometry = LayerGeometry(HEADS, DIM, mx.float32, HEADS, DIM, mx.float32)
    pages = LayerPages(geometry, NativeBackend(library), 64)
    pages.map_slab(0, 3, page_format_named(name))
    pages.load(holding(pages, keys, values, ROWS))
    return pages


def step(count: int, seed: int) -> mx.array:
    return normal((1, HEADS, count, DIM), mx.float32, seed)


@pytest.mark.parametrize("queries", [1, 3, COPIED_BYTES // DIM // HEADS // 4 + 1])
def test_an_output_stays_what_it_is_when_others_are_made(queries: int) -> None:
    """Outputs of the same shape, small and large."""
    pages = written(instruction_sets()[0], step(LENGTH, 1), step(LENGTH, 2))
    asked = [step(queries, seed) for seed in (3, 4)]
    outputs = [pages.attend(each, ROWS, Attention(0.2)) for each in asked * 2]
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
def test_sums_follow_the_largest_logit(isa: str) -> None:
    """The logits grow page by page, or none of the later ones comes near the first. Rotated, keys
    and queries are the same."""
    four = mx.array([1.0, 1.0, 1.0, -1.0])
    signs = mx.flatten(four[:, None, None] * four[:, None] * four)
    assert mx.array_equal(rotate(signs), signs)
    # Logits from 0 to 7.
    rising = mx.arange(LENGTH)[:, None] / 100 / DIM
    for name, queries, growth in product(("fp16", "q8"), (1, 3, 100), (rising, rising[::-1])):
        asked = mx.broadcast_to(signs, (1, HEADS, queries, DIM))
        keys = mx.broadcast_to(signs * growth, (1, HEADS, LENGTH, DIM))
        pages = written(isa, keys, step(LENGTH, 2), name)
        found = numbers(pages.attend(asked, ROWS, Attention(1.0)))[0]
        held = (numbers(part)[0] for part in pages.gather(ROWS))
        options: dict[str, Any] = {"scale": 1.0, "causal": True, "window": None, "sinks": None}
        expected, _ = dense_attention(numbers(asked)[0], *held, **options)
        assert np.abs(found - expected).max() < 1e-4, (name, queries)
