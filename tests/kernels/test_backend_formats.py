"""Pages of every format through each backend, on each instruction set, against dense attention in
float64 over the numbers that the pages hold."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.errors import QuantisedPage
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import MOST, WORD, rotate
from paged_kv.kernels.pages.page_format import (
    PAGE_SIZE,
    FormatName,
    LayerGeometry,
    page_format_named,
)
from paged_kv.kernels.pages.self_test import checks
from tests.support.arrays import normal, numbers
from tests.support.attention_metadata import unpadded
from tests.support.backends import BACKENDS, backend_named
from tests.support.dense_attention import dense_attention
from tests.support.examples import examples
from tests.support.page_numbers import holding, numbers_in

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

FORMATS: list[FormatName] = ["fp16", "q8", "q4", ("q8", "q4"), ("fp16", "q4"), ("q4", "fp16")]
STRIDE = 8
SLAB_PAGES = 4
TOLERANCES = {mx.float32: 5e-6, mx.float16: 4e-3, mx.bfloat16: 2e-2}
ROUNDED_QUERIES = 6e-3  # of 16 bits, to bytes for keys of 5 bits


def same(k_dim: int, v_dim: int, dtype: mx.Dtype = mx.float32) -> LayerGeometry:
    return LayerGeometry(2, k_dim, dtype, 2, v_dim, dtype)


def new_pages(backend: str, geometry: LayerGeometry, formats: Sequence[FormatName]) -> LayerPages:
    """A slab of each format with all bits set: codes, scales and floats of NaN."""
    pages = LayerPages(geometry, backend_named(backend, geometry), STRIDE)
    for slab, name in enumerate(formats):
        pages.map_slab(slab, SLAB_PAGES, page_format_named(name))
        first = slab * STRIDE
        nans = mx.full(pages.page(first).shape, 0xFFFF, dtype=WORD)
        pages.load(dict.fromkeys(range(first, first + SLAB_PAGES), nans))
    return pages


def table_of(pages: LayerPages, length: int, first_slab: int = 0) -> tuple[int, ...]:
    """Table entries for so many tokens, from all slabs in turn."""
    slabs = sorted(pages.slabs, key=lambda slab: (slab < first_slab, slab))
    turns = enumerate(cycle(slabs))
    return tuple(
        slab * STRIDE + turn // len(pages.slabs)
        for turn, slab in islice(turns, -(-length // PAGE_SIZE))
    )


def fill(pages: LayerPages, metadata: AttentionMetadata, seed: int) -> tuple[mx.array, mx.array]:
    """Every sequence has as many tokens as the longest."""
    geometry, longest = pages.geometry, max(metadata.context_lens)
    shape = (len(metadata.context_lens), 2, longest)
    keys = normal((*shape, geometry.k_dim), geometry.k_dtype, seed)
    values = normal((*shape, geometry.v_dim), geometry.v_dtype, seed + 1)
    pages.load(holding(pages, keys, values, metadata))
    return keys, values


def assert_attends(
    pages: LayerPages,
    metadata: AttentionMetadata,
    queries: int,
    *,
    num_new: int = 0,
    with_sinks: bool = False,
    gqa_group_size: int = 3,
    **options: Any,
) -> None:
    """Attention to the pages and to unwritten keys and values of the last tokens."""
    geometry, batch = pages.geometry, len(metadata.context_lens)
    options = {"scale": geometry.k_dim**-0.5, "causal": True, "window": None} | options
    heads = 2 * gqa_group_size
    asked = normal((batch, heads, queries, geometry.k_dim), geometry.k_dtype, seed=1)
    sinks = 2 * normal((heads,), geometry.k_dtype, seed=2) if with_sinks else None
    new_tokens = None
    if num_new:
        new_tokens = (
            normal((batch, 2, num_new, geometry.k_dim), geometry.k_dtype, seed=3),
            normal((batch, 2, num_new, geometry.v_dim), geometry.v_dtype, seed=4),
        )
    ends = tuple(length + num_new for length in metadata.context_lens)
    found = pages.attend(
        asked,
        unpadded(metadata.block_tables, ends),
        Attention(sinks=sinks, **options),
        unwritten=new_tokens,
    )
    options["sinks"] = None if sinks is None else numbers(sinks)
    for row, (table, length) in enumerate(
        zip(metadata.block_tables, metadata.context_lens, strict=True)
    ):
        keys, values = numbers_in(pages, table, length)
        if new_tokens:
            keys.append(numbers(new_tokens[0][row]))
            values.append(numbers(new_tokens[1][row]))
        expected = dense_attention(
            numbers(asked[row]), np.concatenate(keys, 1), np.concatenate(values, 1), **options
        )
        tolerance = TOLERANCES[geometry.k_dtype]
        if any(slab.layout.begins.key_centres for slab in pages.slabs.values()):
            tolerance = max(tolerance, ROUNDED_QUERIES * (geometry.k_dtype != mx.float32))
        assert np.abs(numbers(found[row]) - expected).max() <= tolerance


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("k_dim", "v_dim", "dtype"),
    [
        (32, 160, mx.float32),
        (96, 64, mx.float16),
        (128, 128, mx.bfloat16),
        (576, 512, mx.float32),
        pytest.param(512, 512, mx.bfloat16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_head_sizes(
    backend: str, name: FormatName, k_dim: int, v_dim: int, dtype: mx.Dtype
) -> None:
    pages = new_pages(backend, same(k_dim, v_dim, dtype), [name])
    metadata = unpadded((table_of(pages, 269),), (269,))
    fill(pages, metadata, seed=5)
    for queries in (1, 9):
        assert_attends(pages, metadata, queries)


@pytest.mark.parametrize(
    ("gqa_group_size", "k_dim", "v_dim"),
    [(1, 32, 56), (7, 80, 80), (16, 96, 96), (4, 128, 128), (1, 192, 128), (8, 512, 512)],
)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_head_counts_and_head_sizes(
    backend: str, gqa_group_size: int, k_dim: int, v_dim: int, dtype: mx.Dtype
) -> None:
    pages = new_pages(backend, same(k_dim, v_dim, dtype), ["fp16"])
    metadata = unpadded((table_of(pages, 300),), (300,))
    fill(pages, metadata, seed=5)
    for queries in (1, 5):
        assert_attends(pages, metadata, queries, gqa_group_size=gqa_group_size)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100, 1000])
@pytest.mark.parametrize("queries", [1, 6, 90])
@pytest.mark.slow
def test_rows_of_different_lengths_with_windows_and_sinks(
    backend: str, causal: bool, window: int | None, queries: int
) -> None:
    pages = new_pages(backend, same(32, 48), ["fp16", "fp16", "fp16"])
    lengths = (90, 513, 256, 257)
    entries = iter([slab * STRIDE + page for page in range(SLAB_PAGES) for slab in pages.slabs])
    tables = tuple(tuple(next(entries) for _ in range(-(-length // 256))) for length in lengths)
    metadata = unpadded(tables, lengths)
    fill(pages, metadata, seed=5)
    assert_attends(pages, metadata, queries, causal=causal, window=window, with_sinks=True)


@pytest.mark.parametrize(
    ("dtype", "softcap"), [(mx.float32, 0.5), (mx.float32, 5.0), (mx.float16, 5.0)]
)
def test_softcapped_scores(backend: str, dtype: mx.Dtype, softcap: float) -> None:
    pages = new_pages(backend, same(64, 96, dtype), ["fp16"])
    metadata = unpadded((table_of(pages, 300),), (300,))
    fill(pages, metadata, seed=5)
    for queries in (1, 90):
        assert_attends(pages, metadata, queries, softcap=softcap, with_sinks=True, scale=0.3)


def test_infinite_scores_are_capped_too(backend: str) -> None:
    pages = new_pages(backend, same(32, 32), ["fp16"])
    signs = mx.array([1.0, -1.0, 1.0])[:, None]
    keys = signs * mx.abs(normal((1, 2, 3, 32), mx.float32, seed=1))
    pages.write(keys, keys, unpadded(((0,),), (3,)))
    for sign in (-1, 1):
        queries = mx.full((1, 2, 1, 32), sign * 1e20)
        found = pages.attend(queries, unpadded(((0,),), (3,)), Attention(1e20, softcap=4.0))
        weights = mx.softmax(4.0 * sign * signs, axis=0)
        assert mx.abs(found - (weights * keys).sum(2, keepdims=True)).max() < 1e-5


@examples(15)
@given(
    names=st.lists(st.sampled_from(FORMATS), min_size=1, max_size=3, unique=True),
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=2),
    num_new=st.sampled_from([0, 1, 40, 270]),
    queries=st.sampled_from([1, 3, 9]),
    window=st.none() | st.integers(1, 800),
    causal=st.booleans(),
    with_sinks=st.booleans(),
    softcap=st.none() | st.sampled_from([0.5, 3.0]),
)
@pytest.mark.slow
def test_pages_of_several_formats_in_one_table(
    backend: str,
    names: list[FormatName],
    lengths: list[int],
    num_new: int,
    queries: int,
    window: int | None,
    causal: bool,
    with_sinks: bool,
    softcap: float | None,
) -> None:
    pages = new_pages(backend, same(96, 64), names * 2)
    lengths = [max(length, queries - num_new) for length in lengths]
    tables = tuple(table_of(pages, length, row) for row, length in enumerate(lengths))
    if len(set(sum(tables, ()))) < sum(map(len, tables)):
        lengths, tables = lengths[:1], tables[:1]
    metadata = unpadded(tables, tuple(lengths))
    if max(lengths):
        fill(pages, metadata, seed=7)
    assert_attends(
        pages,
        metadata,
        queries,
        num_new=num_new,
        window=window,
        causal=causal,
        with_sinks=with_sinks,
        softcap=softcap,
    )


def contents(pages: LayerPages, slab: int) -> list[mx.array]:
    return [mx.array(pages.page(slab * STRIDE + at)) for at in range(SLAB_PAGES)]


def step_with_an_outlier(count: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Keys with a large channel, and much in common; and values of which one token has zeros."""
    keys = normal((1, 2, count, 160), dtype, seed=1) + 4 * normal((1, 2, 1, 160), dtype, seed=3)
    keys[..., 7] *= 20
    values = normal((1, 2, count, 128), dtype, seed=2)
    values[:, 1, 5] = 0
    return keys, values


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_recoded_page_has_the_bytes_of_the_format_and_the_others_stay(
    backend: str, name: FormatName, dtype: mx.Dtype
) -> None:
    """Backends add in different orders: one code or scale in 10,000 may be the next one."""
    pages = new_pages(backend, same(160, 128, dtype), ["fp16", name])
    step = step_with_an_outlier(PAGE_SIZE, dtype)
    expected = contents(pages, 1)
    (expected[3],) = holding(pages, *step, unpadded(((STRIDE + 3,),), (PAGE_SIZE,))).values()
    pages.write(*step, unpadded(((2,),), (PAGE_SIZE,)))
    pages.copy({2: STRIDE + 3})
    found = np.concatenate([np.asarray(page) for page in contents(pages, 1)]).view(np.uint8)
    differing = np.mean(found != np.concatenate(expected).view(np.uint8))
    assert differing <= (0 if name == "fp16" else 1e-4)


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -3e38])
def test_a_key_that_float16_cannot_hold_spoils_no_other(backend: str, what: float) -> None:
    pages = new_pages(backend, same(64, 32), ["fp16", "q4"])
    keys = normal((1, 2, PAGE_SIZE, 64), mx.float32, seed=1)
    keys[0, 1, 7, 5] = what
    pages.write(keys, keys[..., :32], unpadded(((2,),), (PAGE_SIZE,)))
    pages.copy({2: STRIDE + 3})
    (found,), _ = numbers_in(pages, (STRIDE + 3,), PAGE_SIZE)
    others = [found[0], np.delete(found[1], 7, axis=0)]
    given = [numbers(keys[0, 0]), np.delete(numbers(keys[0, 1]), 7, axis=0)]
    for a, b in zip(others, given, strict=True):
        assert np.abs(a - b).max() < 1.2  # Python's max of several would pass over NaN.


@pytest.mark.parametrize("name", ["q8", "q4", ("fp16", "q4")])
def test_no_step_is_written_to_a_quantised_page(backend: str, name: FormatName) -> None:
    """Not even the tokens before it, which go to a page of 16 bits."""
    pages = new_pages(backend, same(32, 32), ["fp16", name])
    before = contents(pages, 0)
    step = normal((1, 2, 300, 32), mx.float32, seed=1)
    with pytest.raises(QuantisedPage, match="copy it"):
        pages.write(step, step, unpadded(((0, STRIDE),), (300,)))
    for found, content in zip(contents(pages, 0), before, strict=True):
        assert mx.array_equal(found, content)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("lengths", [(257, 256, 3), (5, 0, 600), (0,)])
def test_gather_gives_the_numbers_that_pages_hold(
    backend: str, name: FormatName, lengths: tuple[int, ...]
) -> None:
    pages = new_pages(backend, same(96, 32), [name] * len(lengths))
    tables = tuple(
        tuple(row * STRIDE + page for page in range(-(-length // PAGE_SIZE)))
        for row, length in enumerate(lengths)
    )
    metadata = unpadded(tables, lengths)
    if max(lengths):
        fill(pages, metadata, seed=3)
    for found, side in zip(pages.gather(metadata), (0, 1), strict=True):
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            before = max(lengths) - length
            assert not found[row, :, :before].any()
            if length:
                held = np.concatenate(numbers_in(pages, table, length)[side], 1)
                assert np.allclose(numbers(found[row, :, before:]), held, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_every_check_of_a_device_passes(backend: str) -> None:
    if backend == "plain":
        pytest.skip("the checks compare with plain operations")
    geometry = same(128, 128, mx.float16)
    wrong = {check.name: check.failure() for check in checks(backend_named(backend, geometry))}
    assert not [name for name, failure in wrong.items() if failure]


def test_groups_of_zeros_and_of_the_largest_numbers(backend: str) -> None:
    """Groups of zeros have scales of zero, and scales beyond float16 become its largest number.
    The numbers are chosen in the basis of the codes, and turned without rounding."""
    pages = new_pages(backend, same(64, 256), ["q4", "q8", "fp16"])
    keys = mx.zeros((1, 2, 512, 64))
    values = mx.full((1, 2, 512, 256), 2.0**24)
    values[..., :64] = -254
    pages.write(keys, rotate(values), unpadded(((2 * STRIDE, 2 * STRIDE + 1),), (512,)))
    pages.copy({2 * STRIDE: 0, 2 * STRIDE + 1: STRIDE})
    recoded = unpadded(((0, STRIDE),), (512,))
    for entry, expected in holding(pages, keys, rotate(values), recoded).items():
        assert mx.array_equal(pages.page(entry), expected)
    found_keys, found_values = pages.gather(recoded)
    assert not found_keys.any()
    values[..., :PAGE_SIZE, 64:] = 8 * MOST
    values[..., PAGE_SIZE:, 64:] = 127 * MOST
    assert mx.allclose(rotate(found_values), values, rtol=1e-6, atol=1)
