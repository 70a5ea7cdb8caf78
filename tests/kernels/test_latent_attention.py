"""Latent attention through each backend, on each instruction set, against dense attention in
float64: all heads share one key, a latent and a position key behind it, and sum the latents."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.kernels.cpu.native_library import thread_count
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import (
    PAGE_SIZE,
    FormatName,
    LayerGeometry,
    page_format_named,
)
from tests.support.arrays import normal, numbers
from tests.support.attention_metadata import unpadded
from tests.support.backends import BACKENDS, backend_named, native_library
from tests.support.dense_attention import dense_attention
from tests.support.examples import examples
from tests.support.page_numbers import holding, numbers_in

FORMATS: list[FormatName] = ["fp16", "q8", "q4", ("q8", "q4"), ("q4", "fp16")]
STRIDE, SLAB_PAGES = 16, 9
TOLERANCES = {mx.float32: 5e-6, mx.float16: 4e-3, mx.bfloat16: 2e-2}

backends = pytest.mark.parametrize("backend", BACKENDS)


def latents_of(dim: int, positions: int, dtype: mx.Dtype = mx.float32) -> LayerGeometry:
    return LayerGeometry(1, dim, dtype, 1, positions, dtype)


def written(
    backend: str,
    geometry: LayerGeometry,
    lengths: Sequence[int],
    formats: Sequence[FormatName] = ("fp16",),
) -> tuple[LayerPages, AttentionMetadata]:
    """Sequences with pages of all formats in turn, among pages of which all bits are set."""
    pages = LayerPages(geometry, backend_named(backend, geometry), STRIDE)
    for slab, name in enumerate(formats):
        pages.map_slab(slab, SLAB_PAGES, page_format_named(name))
        nans = mx.full(pages.page(slab * STRIDE).shape, 0xFFFF, dtype=WORD)
        pages.load({slab * STRIDE + page: nans for page in range(SLAB_PAGES)})
    free = [slab * STRIDE + page for page, slab in product(range(SLAB_PAGES), range(len(formats)))]
    tables = tuple(tuple(free.pop(0) for _ in range(0, length, PAGE_SIZE)) for length in lengths)
    metadata = unpadded(tables, tuple(lengths))
    shape = (len(lengths), 1, max(lengths))
    latents = normal((*shape, geometry.k_dim), geometry.k_dtype, 1)
    position_keys = normal((*shape, geometry.v_dim), geometry.v_dtype, 2)
    pages.load(holding(pages, latents, position_keys, metadata))
    return pages, metadata


def assert_attends(
    pages: LayerPages,
    metadata: AttentionMetadata,
    heads: int,
    *,
    queries: int = 1,
    num_new: int = 0,
    **options: Any,
) -> None:
    """Attention to the pages, and to unwritten tokens behind them."""
    geometry, batch = pages.geometry, len(metadata.context_lens)
    options = {"scale": geometry.k_dim**-0.5, "causal": True, "window": None} | options
    asked = normal((batch, heads, queries, geometry.k_dim), geometry.k_dtype, 3)
    positions = normal((batch, heads, queries, geometry.v_dim), geometry.k_dtype, 4) * 0.1
    unwritten = (
        normal((batch, 1, num_new, geometry.k_dim), geometry.k_dtype, 5),
        normal((batch, 1, num_new, geometry.v_dim), geometry.v_dtype, 6),
    )
    ends = tuple(length + num_new for length in metadata.context_lens)
    found = pages.attend(
        asked,
        unpadded(metadata.block_tables, ends),
        Attention(**options),
        unwritten if num_new else None,
        positions,
    )
    assert (found.dtype, found.shape) == (geometry.k_dtype, asked.shape)
    scale = options.pop("scale")
    for row, (table, length) in enumerate(
        zip(metadata.block_tables, metadata.context_lens, strict=True)
    ):
        latents, position_keys = (
            np.concatenate([*parts, numbers(new[row])], 1)
            for parts, new in zip(numbers_in(pages, table, length), unwritten, strict=True)
        )
        expected = dense_attention(
            np.concatenate([scale * numbers(asked[row]), numbers(positions[row])], -1),
            np.concatenate([latents, position_keys], -1),
            latents,
            scale=1.0,
            sinks=None,
            **options,
        )
        assert np.abs(numbers(found[row]) - expected).max() <= TOLERANCES[geometry.k_dtype]


@backends
@pytest.mark.parametrize(("dim", "positions"), [(512, 64), (256, 64), (40, 24), (8, 8), (576, 64)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_head_sizes_and_dtypes(backend: str, dim: int, positions: int, dtype: mx.Dtype) -> None:
    assert_attends(*written(backend, latents_of(dim, positions, dtype), [300, 20]), 16)


@backends
def test_pages_of_several_formats_in_a_sequence(backend: str) -> None:
    """A single thread reads two pages in a task. Of the first two, only the position keys are in
    different bases."""
    pages, metadata = written(backend, latents_of(64, 32), [1500, 700], FORMATS[::-1])
    native_library().use_threads(1)
    assert_attends(pages, metadata, 20)
    native_library().use_threads(thread_count())


@backends
def test_padding_gets_finite_outputs_and_the_rest_is_right(backend: str) -> None:
    geometry = latents_of(64, 32)
    pages, metadata = written(backend, geometry, [300, 7])
    asked, positions = (normal((2, 4, 3, dim), mx.float32, 8) for dim in (64, 32))
    padded = AttentionMetadata(metadata.block_tables, metadata.context_lens, (0, 2))
    found = pages.attend(asked, padded, Attention(0.1), None, positions)
    row = unpadded(metadata.block_tables[1:], (7,))
    alone = pages.attend(asked[1:, :, :1], row, Attention(0.1), None, positions[1:, :, :1])
    assert np.isfinite(numbers(found)).all()
    assert mx.allclose(found[1:, :, :1], alone, rtol=0, atol=1e-6)


@backends
def test_queries_in_any_order_of_memory(backend: str) -> None:
    pages, metadata = written(backend, latents_of(64, 32), [300])
    asked, positions = (
        normal((1, 1, dim, 6), mx.float32, 8).transpose(0, 3, 1, 2) for dim in (64, 32)
    )
    found = pages.attend(asked, metadata, Attention(0.1), None, positions)
    asked, positions = mx.contiguous(asked), mx.contiguous(positions)
    assert mx.array_equal(found, pages.attend(asked, metadata, Attention(0.1), None, positions))


@backends
def test_a_deferred_step_is_attended_to(backend: str) -> None:
    geometry = latents_of(64, 32)
    (pages, metadata), (expected, _) = (written(backend, geometry, [300, 8]) for _ in range(2))
    keys, values = (normal((2, 1, 1, dim), mx.float32, 9) for dim in (64, 32))
    asked, positions = (normal((2, 4, 1, dim), mx.float32, 8) for dim in (64, 32))
    longer = unpadded(metadata.block_tables, (301, 9))
    pages.write_later(keys, values, longer)
    expected.write(keys, values, longer)
    found = pages.attend(asked, longer, Attention(0.1), None, positions)
    assert mx.array_equal(found, expected.attend(asked, longer, Attention(0.1), None, positions))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 4, 1, 16), mx.float32),
        ((1, 3, 1, 32), mx.float32),
        ((1, 4, 2, 32), mx.float32),
        ((1, 4, 1, 32), mx.float16),
    ],
)
def test_position_queries_that_do_not_fit_are_refused(
    shape: tuple[int, ...], dtype: mx.Dtype
) -> None:
    native_library()
    pages, metadata = written(BACKENDS[-1], latents_of(64, 32), [300])
    asked = normal((1, 4, 1, 64), mx.float32, 1)
    with pytest.raises(ValueError, match="do not fit"):
        pages.attend(asked, metadata, Attention(0.1), None, normal(shape, dtype, 2))


@backends
@examples(25)
@given(
    sizes=st.tuples(st.sampled_from([32, 64, 96]), st.sampled_from([32, 64])),
    lengths=st.lists(
        st.sampled_from([5, 255, 256, 257, 513]) | st.integers(5, 500), min_size=1, max_size=3
    ),
    heads=st.sampled_from([1, 8, 70]) | st.integers(1, 40),
    queries=st.integers(1, 4),
    formats=st.lists(st.sampled_from(FORMATS), min_size=1, max_size=3, unique=True),
    num_new=st.integers(0, 4),
    options=st.fixed_dictionaries(
        {"causal": st.booleans(), "window": st.none() | st.sampled_from([1, 300])}
    ),
)
@pytest.mark.slow
def test_any_batch(
    backend: str,
    sizes: tuple[int, int],
    lengths: list[int],
    heads: int,
    queries: int,
    formats: list[FormatName],
    num_new: int,
    options: dict[str, Any],
) -> None:
    pages, metadata = written(backend, latents_of(*sizes), lengths, formats)
    assert_attends(pages, metadata, heads, queries=queries, num_new=num_new, **options)
