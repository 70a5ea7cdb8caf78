"""Steps that read chosen tokens, on each backend, against a choice and attention in float64."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, LayerGeometry, page_format_named
from tests.support.arrays import normal, numbers
from tests.support.attention_metadata import unpadded
from tests.support.backends import BACKENDS, backend_named
from tests.support.choices import chosen
from tests.support.dense_attention import Numbers, dense_attention
from tests.support.summarised_pages import (
    assert_summarised,
    clustered,
    queries_like,
    summary_words,
)

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

STRIDE = 32
SLAB_PAGES = (7, 21)
READ = 1024
NAN_WORD = 0x7FC0  # a NaN in float16, in bfloat16 and, twice, in float32
# Largest differences from float64. MLX rounds logits of up to 20 to the dtype.
TOLERANCES = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 8e-2}


def geometry_of(dtype: mx.Dtype, heads: int = 2, dim: int = 64) -> LayerGeometry:
    return LayerGeometry(heads, dim, dtype, heads, dim, dtype, has_summaries=True)


def new_pages(backend: str, geometry: LayerGeometry) -> LayerPages:
    """Pages full of NaN, like freed ones: 16 bits in two slabs, q8 and q4 in one each."""
    pages = LayerPages(geometry, backend_named(backend, geometry), STRIDE)
    for slab, count in enumerate(SLAB_PAGES):
        pages.map_slab(slab, count, FP16)
    for slab, name in enumerate(("q8", "q4"), len(SLAB_PAGES)):
        pages.map_slab(slab, STRIDE, page_format_named(name))
    for number, mapped in pages.slabs.items():
        layout, count = mapped.layout, mapped.memory.shape[0] // mapped.layout.page_units
        nans = mx.full((layout.page_units, layout.unit_words), NAN_WORD, dtype=WORD)
        pages.load({number * STRIDE + page: nans for page in range(count)})
    return pages


def tables_of(lengths: list[int]) -> tuple[tuple[int, ...], ...]:
    entries = [at * STRIDE + page for at, count in enumerate(SLAB_PAGES) for page in range(count)]
    free = [int(each) for each in np.random.default_rng(0).permutation(entries)]
    return tuple(tuple(free.pop() for _ in range(-(-length // PAGE_SIZE))) for length in lengths)


class Rows:
    """Sequences whose last token was written in a step of its own."""

    def __init__(self, backend: str, geometry: LayerGeometry, lengths: list[int]) -> None:
        self.pages, self.lengths = new_pages(backend, geometry), lengths
        self.tables = tables_of(lengths)
        self.keys = [clustered(length, geometry, 7 * row) for row, length in enumerate(lengths)]
        self.values = [
            normal((geometry.v_heads, length, geometry.v_dim), geometry.v_dtype, 90 + row)
            for row, length in enumerate(lengths)
        ]
        for table, k, v, length in zip(self.tables, self.keys, self.values, lengths, strict=True):
            before = length - 1
            self.pages.write(
                k[None, :, :before], v[None, :, :before], unpadded((table,), (before,))
            )
        self.metadata = unpadded(self.tables, tuple(lengths))
        latest = [mx.stack([each[:, -1:] for each in all_]) for all_ in (self.keys, self.values)]
        self.step = latest[0], latest[1]

    def queries(self, group: int) -> mx.array:
        return queries_like(self.keys, group)

    def written_and_attended(self, queries: mx.array, attention: Attention) -> mx.array:
        self.pages.write_later(*self.step, self.metadata)
        return self.pages.attend(queries, self.metadata, attention)


def expected(rows: Rows, queries: mx.array, row: int, read_tokens: int, **options: Any) -> Numbers:
    """The output of one row, head by head."""
    keys, values = numbers(rows.keys[row]), numbers(rows.values[row])
    scale, sinks = options.pop("scale"), options.pop("sinks", None)
    group = queries.shape[1] // len(keys)
    outputs = []
    for head, (k, v) in enumerate(zip(keys, values, strict=True)):
        own = slice(head * group, head * group + group)
        asked = numbers(queries[row])[own]
        at = chosen(asked[:, 0], k, scale, read_tokens)
        output = dense_attention(
            asked,
            k[None, at],
            v[None, at],
            scale=scale,
            causal=True,
            window=None,
            sinks=None if sinks is None else sinks[own],
            **options,
        )
        outputs.append(output)
    return np.concatenate(outputs)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("group", [1, 3, 9])
@pytest.mark.slow
def test_each_row_and_kv_head_reads_what_matters_most(
    backend: str, dtype: mx.Dtype, group: int
) -> None:
    rows = Rows(backend, geometry_of(dtype), [2900, 700, 1025, 1600])
    queries = rows.queries(group)
    found = rows.written_and_attended(queries, Attention(64**-0.5, read_tokens=READ))
    assert found.shape == queries.shape
    for row in range(len(rows.lengths)):
        wanted = expected(rows, queries, row, READ, scale=64**-0.5)
        np.testing.assert_allclose(numbers(found[row]), wanted, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("length", [1793, 1857, 2048, 2049])
def test_ends_of_runs_and_pages(backend: str, length: int) -> None:
    rows = Rows(backend, geometry_of(mx.float32, dim=32), [length])
    queries = rows.queries(2)
    found = rows.written_and_attended(queries, Attention(0.2, read_tokens=768))
    wanted = expected(rows, queries, 0, 768, scale=0.2)
    np.testing.assert_allclose(numbers(found[0]), wanted, atol=1e-5)


def test_what_may_be_read_whole_has_the_same_bits(backend: str) -> None:
    rows = Rows(backend, geometry_of(mx.float16), [1500, 300])
    queries = rows.queries(4)
    exact = rows.written_and_attended(queries, Attention(0.1))
    mx.eval(exact)
    may_choose = rows.pages.attend(queries, rows.metadata, Attention(0.1, read_tokens=1500))
    assert mx.array_equal(exact, may_choose)


def test_sinks_and_softcaps(backend: str) -> None:
    rows = Rows(backend, geometry_of(mx.float32), [2000, 1400])
    queries, sinks = rows.queries(2), normal((4,), mx.float32, 5)
    attention = Attention(0.1, sinks=sinks, softcap=5.0, read_tokens=READ)
    found = rows.written_and_attended(queries, attention)
    for row in range(2):
        options: dict[str, Any] = {"scale": 0.1, "sinks": numbers(sinks), "softcap": 5.0}
        wanted = expected(rows, queries, row, READ, **options)
        np.testing.assert_allclose(numbers(found[row]), wanted, atol=2e-5)


@pytest.mark.parametrize("name", ["q8", "q4"])
def test_quantised_pages_choose_by_the_keys_that_they_were_made_of(backend: str, name: str) -> None:
    rows = Rows(backend, geometry_of(mx.float16), [2900])
    queries = rows.queries(3)
    attention = Attention(0.2, read_tokens=READ)
    exact = rows.written_and_attended(queries, attention)
    mx.eval(exact)
    slab = 2 if name == "q8" else 3
    full = rows.tables[0][: 2899 // PAGE_SIZE]
    copies = {entry: slab * STRIDE + at for at, entry in enumerate(full)}
    rows.pages.copy(copies)
    quantised = replace(
        rows.metadata, block_tables=((*copies.values(), *rows.tables[0][len(full) :]),)
    )
    found = rows.pages.attend(queries, quantised, attention)
    assert float(mx.abs(exact - found).max()) < (0.02 if name == "q8" else 0.4)
    for source, target in copies.items():
        assert np.array_equal(summary_words(rows.pages, source), summary_words(rows.pages, target))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_step_that_fills_a_page_summarises_it(backend: str, dtype: mx.Dtype) -> None:
    geometry = geometry_of(dtype, dim=96)
    pages = new_pages(backend, geometry)
    table, keys = tables_of([1024])[0], clustered(1024, geometry, 3)
    ends = [100, 255, 256, 700, 768, 1023, 1024]
    for before, end in zip([0, *ends], ends, strict=False):
        metadata = unpadded((table,), (end,))
        pages.write(keys[None, :, before:end], keys[None, :, before:end], metadata)
        for page, entry in enumerate(table):
            begin = page * PAGE_SIZE
            if begin + PAGE_SIZE <= end:
                assert_summarised(pages, entry, keys[:, begin : begin + PAGE_SIZE])
            else:
                assert np.all(summary_words(pages, entry) == NAN_WORD), (end, page)


def test_a_page_that_is_filled_again_is_summarised_again(backend: str) -> None:
    geometry = geometry_of(mx.float32)
    pages = new_pages(backend, geometry)
    table, keys, others = (3,), clustered(256, geometry, 1), clustered(256, geometry, 2)
    pages.write(keys[None], keys[None], unpadded((table,), (256,)))
    again = mx.concatenate([keys[:, :90], others[:, 90:]], axis=1)
    for begin, end in ((90, 200), (200, 256)):
        part = again[None, :, begin:end]
        pages.write(part, part, unpadded((table,), (end,)))
    assert_summarised(pages, 3, again)


def test_padding_fills_no_page(backend: str) -> None:
    geometry = geometry_of(mx.float32)
    pages = new_pages(backend, geometry)
    keys = clustered(260, geometry, 1)[None]
    # Four tokens of padding on each side of 252.
    pages.write(keys, keys, AttentionMetadata(((5,),), (252,), (4,)))
    assert np.all(summary_words(pages, 5) == NAN_WORD)
    last = clustered(4, geometry, 2)[None]
    pages.write(last, last, unpadded(((5,),), (256,)))
    assert_summarised(pages, 5, mx.concatenate([keys[0, :, 4:256], last[0]], axis=1))


def test_numbers_beyond_float16_are_summarised_by_the_largest(backend: str) -> None:
    geometry = geometry_of(mx.float32)
    pages = new_pages(backend, geometry)
    keys = 1e5 * clustered(256, geometry, 1)
    pages.write(keys[None], keys[None], unpadded(((2,),), (256,)))
    words = numbers(mx.array(summary_words(pages, 2)).view(mx.float16))
    assert np.isfinite(words).all()
    assert words.max() == 65504


def test_several_tokens_and_windows_are_attended_to_exactly(backend: str) -> None:
    rows = Rows(backend, geometry_of(mx.float32), [2000])
    rows.pages.write(*rows.step, rows.metadata)
    several = normal((1, 4, 3, 64), mx.float32, 1)
    for queries, window in ((several, None), (several[:, :, :1], 1500)):
        plain, choosing = (
            rows.pages.attend(
                queries, rows.metadata, Attention(0.1, window=window, read_tokens=read)
            )
            for read in (None, 768)
        )
        assert mx.array_equal(plain, choosing)
