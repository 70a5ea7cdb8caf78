"""CPU kernels that read a shared page once for all of its sequences, against the same kernels
without the knowledge that pages are shared: the same bits, of fewer bytes."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.kernels.cpu.native_backend import NativeBackend
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
from tests.support.arrays import normal
from tests.support.attention_metadata import unpadded
from tests.support.backends import instruction_sets, native_library
from tests.support.examples import examples

STRIDE, PAGES = 64, 40
FORMATS: list[FormatName] = ["fp16", "q8", "q4"]


def filled(name: str, geometry: LayerGeometry) -> LayerPages:
    """A slab of each format. Page p holds the same numbers in all, as far as its format can."""
    library = native_library()
    library.use_instruction_set(name)
    pages = LayerPages(geometry, NativeBackend(library), STRIDE)
    quantises = geometry.k_dim % 32 == geometry.v_dim % 32 == 0
    for slab, page_format in enumerate(FORMATS if quantises else FORMATS[:1]):
        pages.map_slab(slab, PAGES, page_format_named(page_format))
    shape = pages.page(0).shape
    words = int(np.prod(shape)) * WORD.size // geometry.k_dtype.size
    for page in range(PAGES):
        content = normal((words,), geometry.k_dtype, page).view(WORD).reshape(shape)
        pages.load({page: content})
    for slab in range(1, len(pages.slabs)):
        pages.copy({page: slab * STRIDE + page for page in range(PAGES)})
    return pages


def attended(
    pages: LayerPages, metadata: AttentionMetadata, asked: Sequence[mx.array], **options: Any
) -> tuple[mx.array, int]:
    """The output, and the bytes of pages that were read."""
    library, before = native_library(), native_library().page_bytes_read()
    new_tokens = options.pop("new_tokens", None)
    queries, *positions = asked
    output = pages.attend(queries, metadata, Attention(**options), new_tokens, *positions)
    mx.eval(output)
    return output, library.page_bytes_read() - before


def unshared(metadata: AttentionMetadata) -> AttentionMetadata:
    """The same sequences as if no two shared a page."""
    copy = AttentionMetadata(metadata.block_tables, metadata.context_lens, metadata.right_padding)
    copy.__dict__["shared_pages"] = None
    return copy


def assert_same_bits(
    pages: LayerPages, metadata: AttentionMetadata, asked: Sequence[mx.array], **options: Any
) -> tuple[int, int]:
    """The bytes that are read with shared pages, and without."""
    expected, all_bytes = attended(pages, unshared(metadata), asked, **options)
    found, shared_bytes = attended(pages, metadata, asked, **options)
    assert np.isfinite(np.asarray(expected.astype(mx.float32))).all()
    assert mx.array_equal(found.view(mx.uint8), expected.view(mx.uint8))
    assert shared_bytes <= all_bytes
    return shared_bytes, all_bytes


@st.composite
def forked_tables(draw: st.DrawFn, slabs: int) -> tuple[tuple[int, ...], ...]:
    """Tables that fork from each other, in no order; a page is in one format for all."""
    free = iter(draw(st.permutations(range(PAGES))))

    def fresh(count: int) -> tuple[int, ...]:
        return tuple(next(free) + draw(st.integers(0, slabs - 1)) * STRIDE for _ in range(count))

    tables = [fresh(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(1, 6))):
        parent = draw(st.sampled_from(tables))
        kept = parent[: draw(st.integers(0, len(parent)))]
        tables.append(kept + fresh(draw(st.integers(int(not kept), 2))))
    return tuple(draw(st.permutations(tables)))


@st.composite
def batches(draw: st.DrawFn, slabs: int, steps: int) -> AttentionMetadata:
    """Contexts that end anywhere in their last page, with right padding."""
    tables = draw(forked_tables(slabs))
    lengths = [draw(st.integers(len(t) * 256 - 255, len(t) * 256)) for t in tables]
    padding = [draw(st.integers(0, steps - 1)) for _ in tables]
    return AttentionMetadata(tables, tuple(lengths), tuple(padding))


@pytest.mark.slow
@examples(20)
@given(
    data=st.data(),
    name=st.sampled_from(instruction_sets()),
    steps=st.sampled_from([1, 1, 2, 5, 9]),
    heads=st.integers(1, 3),
    gqa_group_size=st.sampled_from([1, 3, 4, 16]),
    dims=st.sampled_from([(64, 64), (128, 128), (96, 64), (72, 40)]),
    dtype=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
    window=st.none() | st.integers(1, 900),
    softcap=st.none() | st.just(20.0),
    with_sinks=st.booleans(),
    causal=st.booleans(),
    threads=st.sampled_from([1, 2, 5]),
    num_new=st.integers(0, 3),
)
def test_sums_are_the_same_in_every_company(
    data: st.DataObject,
    name: str,
    steps: int,
    heads: int,
    gqa_group_size: int,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    causal: bool,
    threads: int,
    num_new: int,
) -> None:
    pages = filled(name, LayerGeometry(heads, dims[0], dtype, heads, dims[1], dtype))
    metadata = data.draw(batches(len(pages.slabs), steps))
    batch, q_heads = len(metadata.context_lens), heads * gqa_group_size
    asked = normal((batch, q_heads, steps, dims[0]), dtype, 1)
    options: dict[str, Any] = {"scale": dims[0] ** -0.5, "causal": causal, "window": window}
    options["softcap"] = softcap
    options["sinks"] = normal((q_heads,), dtype, 2) if with_sinks else None
    if num_new and min(metadata.context_lens) >= num_new:
        options["new_tokens"] = (
            normal((batch, heads, num_new, dims[0]), dtype, 3),
            normal((batch, heads, num_new, dims[1]), dtype, 4),
        )
    library = native_library()
    before = thread_count()
    library.use_threads(threads)
    try:
        assert_same_bits(pages, metadata, [asked], **options)
    finally:
        library.use_threads(before)


def behind(shared: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """The tables of rows with so many pages in common and one of their own."""
    return tuple((*range(shared), shared + row) for row in range(rows))


@pytest.fixture(params=instruction_sets())
def pages(request: pytest.FixtureRequest) -> LayerPages:
    return filled(request.param, LayerGeometry(2, 64, mx.bfloat16, 2, 64, mx.bfloat16))


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("slab", range(len(FORMATS)))
@pytest.mark.slow
def test_a_shared_page_is_read_once(pages: LayerPages, steps: int, slab: int) -> None:
    """16 sequences behind 12 pages; a step of 5 tokens is a draft's verification."""
    shared, rows, length = 12, 16, 12 * PAGE_SIZE + 200
    tables = tuple(tuple(slab * STRIDE + page for page in table) for table in behind(shared, rows))
    metadata = unpadded(tables, (length,) * rows)
    asked = normal((rows, 8, steps, 64), mx.bfloat16, 1)
    found, without = assert_same_bits(pages, metadata, [asked], scale=0.125)
    planes = pages.layout_of(slab * STRIDE).planes
    token = WORD.size * sum(each.words // PAGE_SIZE for each in planes if each.slots == PAGE_SIZE)
    assert without == rows * length * token
    # Verification's panels of 256 query rows take 12 sequences of 5 queries of 4 heads.
    groups = 1 if steps == 1 else 2
    assert found == (groups * shared * PAGE_SIZE + rows * 200) * token


def test_a_shared_page_of_latents_is_read_once() -> None:
    pages = filled(instruction_sets()[0], LayerGeometry(1, 128, mx.float16, 1, 64, mx.float16))
    metadata = unpadded(behind(6, 8), (6 * PAGE_SIZE + 100,) * 8)
    asked = [normal((8, 16, 1, dim), mx.float16, dim) for dim in (128, 64)]
    found, _ = assert_same_bits(pages, metadata, asked, scale=0.1)
    assert found == (6 * PAGE_SIZE + 8 * 100) * 2 * (128 + 64)


def test_a_page_that_a_window_begins_in_is_each_sequences_own(pages: LayerPages) -> None:
    lengths = tuple(5 * PAGE_SIZE + 10 + row for row in range(4))
    metadata = unpadded(behind(5, 4), lengths)
    asked = normal((4, 8, 1, 64), mx.bfloat16, 1)
    found, _ = assert_same_bits(pages, metadata, [asked], scale=0.125, window=600)
    token = pages.layout_of(0).page_bytes // PAGE_SIZE
    own = sum(length - 5 * PAGE_SIZE + 3 * PAGE_SIZE + 600 - length for length in lengths)
    assert found == (own + 2 * PAGE_SIZE) * token


def test_a_sequence_that_ends_in_a_shared_page_reads_what_it_sees(pages: LayerPages) -> None:
    """What others hold behind its end is not finite here."""
    nan = mx.full(pages.page(2).shape, 0xFFFF, dtype=WORD)
    pages.load({2: nan})
    metadata = unpadded(((0, 1, 2), (0, 1, 3)), (2 * PAGE_SIZE, 2 * PAGE_SIZE + 50))
    assert_same_bits(pages, metadata, [normal((2, 8, 1, 64), mx.bfloat16, 1)], scale=0.125)


def test_rows_that_end_early_do_not_part_those_around_them(pages: LayerPages) -> None:
    """An empty row between two that share pages."""
    metadata = unpadded(((0, 1, 4), (0, 1), (0, 1, 5)), (600, 0, 610))
    found, _ = assert_same_bits(
        pages, metadata, [normal((3, 8, 1, 64), mx.bfloat16, 1)], scale=0.125
    )
    token = pages.layout_of(0).page_bytes // PAGE_SIZE
    assert found == (2 * PAGE_SIZE + 88 + 98) * token


@pytest.mark.parametrize("length", [1, 50, 51])
def test_what_lies_behind_the_last_token_is_not_read(pages: LayerPages, length: int) -> None:
    """It is not finite, and no weight hides that."""
    pages.load({3: mx.full(pages.page(3).shape, 0xFFFF, dtype=WORD)})
    metadata = unpadded(((3,),), (length,))
    step = normal((1, 2, length, 64), mx.bfloat16, 1), normal((1, 2, length, 64), mx.bfloat16, 2)
    pages.write(*step, metadata)
    output, _ = attended(pages, metadata, [normal((1, 8, 1, 64), mx.bfloat16, 3)], scale=0.125)
    assert np.isfinite(np.asarray(output.astype(mx.float32))).all()
