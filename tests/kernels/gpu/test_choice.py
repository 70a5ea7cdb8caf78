"""Steps that read chosen tokens on GPU kernels, with every access checked, beside plain operations.

Both choose by summaries of the same keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.gpu import tuning
from paged_kv.kernels.pages import tables as tables_module
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import PAGE_SIZE, LayerGeometry, page_format_named
from tests.support.arrays import normal, numbers
from tests.support.attention_metadata import unpadded
from tests.support.gpu_on_cpu.emulated import Device
from tests.support.gpu_on_cpu.launch_order import unordered
from tests.support.gpu_pages import (
    DIALECTS,
    TOLERANCES,
    Separately,
    backend_on,
    device_of,
    needs_compiler,
    rarely,
    same,
)
from tests.support.summarised_pages import (
    assert_summarised,
    clustered,
    queries_like,
    summary_words,
)

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.parametrize("dialect", DIALECTS)]

STRIDE = 16
READ = 768
Table = tuple[int, ...]


def summarised(dim: int = 64, dtype: mx.Dtype = mx.float16, *, heads: int = 2) -> LayerGeometry:
    return replace(same(dim, dtype, heads=heads), has_summaries=True)


def new_pages(backend: Any, geometry: LayerGeometry, page_format: str, slabs: int) -> LayerPages:
    """Slabs of 16 bits, then one of another format, with all bits set."""
    pages = LayerPages(geometry, backend, STRIDE)
    for slab, name in enumerate(["fp16"] * slabs + [page_format]):
        pages.map_slab(slab, STRIDE, page_format_named(name))
        memory = pages.slabs[slab].memory
        pages.slabs[slab].memory = mx.contiguous(mx.full(memory.shape, 0xFFFF, dtype=WORD))
        mx.eval(pages.slabs[slab].memory)
    return pages


class Sides:
    """The same sequences in pages of GPU kernels and of plain operations, without their last token.

    Of a `page_format` with fewer bits, pages that are full before the last token have it: those of
    plain operations, so that both sides hold the same codes.
    """

    def __init__(
        self,
        backend: Any,
        lengths: Sequence[int],
        geometry: LayerGeometry | None = None,
        page_format: str = "fp16",
        tables: tuple[Table, ...] | None = None,
    ) -> None:
        self.geometry = geometry or summarised()
        of_sequences = sum(-(-length // PAGE_SIZE) for length in lengths)
        self.slabs = max(2, -(-of_sequences // STRIDE))
        self.ours, self.theirs = (
            new_pages(each, self.geometry, page_format, self.slabs) for each in (backend, Backend())
        )
        self.metadata = unpadded(tables or self._tables(lengths), tuple(lengths))
        self.keys = [
            clustered(length, self.geometry, 7 * row) for row, length in enumerate(lengths)
        ]
        for table, keys in zip(self.metadata.block_tables, self.keys, strict=True):
            before = keys.shape[1] - 1
            values = normal((1, *keys.shape), self.geometry.v_dtype, before)[:, :, :before]
            for pages in (self.ours, self.theirs):
                if before:
                    pages.write(keys[None, :, :before], values, unpadded((table,), (before,)))
        if page_format != "fp16":
            self._quantise()
        latest = mx.stack([keys[:, -1:] for keys in self.keys])
        self.step = latest, normal(latest.shape, self.geometry.v_dtype, 5)

    def _tables(self, lengths: Sequence[int]) -> tuple[Table, ...]:
        """Pages from all slabs of 16 bits in turn."""
        entries = iter(
            [slab * STRIDE + page for page in range(STRIDE) for slab in range(self.slabs)]
        )
        return tuple(tuple(next(entries) for _ in range(-(-n // PAGE_SIZE))) for n in lengths)

    def _quantise(self) -> None:
        target = iter(range(self.slabs * STRIDE, (self.slabs + 1) * STRIDE))
        copies: dict[int, int] = {}
        tables: list[Table] = []
        for table, length in zip(
            self.metadata.block_tables, self.metadata.context_lens, strict=True
        ):
            full = table[: (length - 1) // PAGE_SIZE]
            copies.update(zip(full, target, strict=False))
            tables.append((*[copies[entry] for entry in full], *table[len(full) :]))
        self.theirs.copy(copies)
        self.ours.load({entry: self.theirs.page(entry) + 0 for entry in copies.values()})
        self.metadata = unpadded(tuple(tables), self.metadata.context_lens)

    def queries(self, group: int) -> mx.array:
        return queries_like(self.keys, group)

    def expected(
        self, queries: mx.array, metadata: AttentionMetadata, attention: Attention
    ) -> mx.array:
        """What plain operations make of it in float32: in the queries' dtype, MLX rounds logits."""
        return self.theirs.attend(queries.astype(mx.float32), metadata, attention)

    def error(self, group: int = 2, *, separately: bool = False, **options: Any) -> float:
        """The largest difference of a step that leaves out tokens."""
        queries = self.queries(group)
        attention = Attention(**{"scale": 0.1, "read_tokens": READ} | options)
        backend: Any = self.ours.backend
        asked = Separately(backend) if separately else backend
        found = asked.attend(self.ours, queries, self.metadata, attention, step=self.step)
        self.theirs.write(*self.step, self.metadata)
        expected = self.expected(queries, self.metadata, attention)
        exact = self.expected(queries, self.metadata, replace(attention, read_tokens=None))
        assert not mx.array_equal(exact, expected)
        for row, length in enumerate(self.metadata.context_lens):
            if length <= (attention.read_tokens or 0):
                assert mx.array_equal(exact[row], expected[row])
        assert np.isfinite(numbers(found)).all()
        return float(np.abs(numbers(found) - numbers(expected)).max())


def names(device: Device) -> list[str]:
    return [launch.name.split("_")[2] for launch in device.launches]


@pytest.mark.parametrize(("dtype", "separately"), [(mx.float16, False), (mx.bfloat16, True)])
def test_rows_of_any_length(dialect: str, dtype: mx.Dtype, separately: bool) -> None:
    """Of several slabs. Some may be read whole, one has a single token."""
    device = device_of(dialect, "shuffled")
    sides = Sides(backend_on(device, dialect), [1100, 300, 769, 1, 768], summarised(64, dtype))
    assert sides.error(3, separately=separately) <= TOLERANCES[dtype]
    assert "score" in names(device)
    assert unordered(device.launches) == []


@pytest.mark.parametrize("length", [1024, 1025, 1089, 1280, 1281])
def test_ends_of_runs_and_pages(dialect: str, length: int) -> None:
    geometry = summarised(heads=1)
    sides = Sides(backend_on(device_of(dialect), dialect), [length], geometry)
    assert sides.error() <= TOLERANCES[mx.float16]


@pytest.mark.parametrize(("page_format", "group"), [("q8", 1), ("q4", 4)])
def test_quantised_pages(dialect: str, page_format: str, group: int) -> None:
    backend = backend_on(device_of(dialect), dialect)
    sides = Sides(backend, [1300], page_format=page_format)
    assert sides.error(group) <= TOLERANCES[mx.float16]


@pytest.mark.parametrize(("dim", "group"), [(80, 16), (512, 5), rarely(96, 9), rarely(192, 5)])
def test_head_sizes_and_query_heads_that_share_keys(dialect: str, dim: int, group: int) -> None:
    """More of them than one block of a threadgroup has rows for, the last partly empty."""
    sides = Sides(backend_on(device_of(dialect), dialect), [1100], summarised(dim, heads=1))
    assert sides.error(group, scale=6.4 / dim) <= TOLERANCES[mx.float16]


def test_chosen_tokens_are_read_in_parts(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST_TOKENS", dict.fromkeys(tuning.LEAST_TOKENS, 4))
    device = device_of(dialect, "shuffled")
    sides = Sides(backend_on(device, dialect), [1100, 800])
    sinks = normal((4,), mx.float16, 3)
    # No whole run has so many tokens.
    options: dict[str, Any] = {"sinks": sinks, "softcap": 5.0, "read_tokens": 800}
    assert sides.error(**options) <= TOLERANCES[mx.float16]
    assert names(device)[-3:] == ["score", "decode", "merge"]


def test_padding_chooses_nothing(dialect: str) -> None:
    sides = Sides(backend_on(device_of(dialect), dialect), [1100, 1000])
    metadata = AttentionMetadata(sides.metadata.block_tables, (1100, 1000), (0, 1))
    queries = sides.queries(2)
    attention = Attention(0.2, read_tokens=READ)
    before = summary_words(sides.ours, metadata.block_tables[1][-1])
    found = numbers(
        sides.ours.backend.attend(sides.ours, queries, metadata, attention, step=sides.step)
    )
    sides.theirs.write(*sides.step, metadata)
    expected = numbers(sides.expected(queries, metadata, attention))
    assert np.abs(found[0] - expected[0]).max() <= TOLERANCES[mx.float16]
    assert not found[1].any()
    assert np.array_equal(summary_words(sides.ours, metadata.block_tables[1][-1]), before)


def test_sequences_that_share_pages_choose_for_themselves(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables_module, "LEAST_SAVED", 1)
    device = device_of(dialect)
    sides = Sides(backend_on(device, dialect), [1300, 1290], tables=((0, 1, 2, 3, 4, 5),) * 2)
    before_step = replace(sides.metadata, context_lens=(1299, 1289))
    arguments = sides.queries(2), before_step, Attention(0.2, read_tokens=READ)
    found, expected = sides.ours.attend(*arguments), sides.expected(*arguments)
    assert np.abs(numbers(found) - numbers(expected)).max() <= TOLERANCES[mx.float16]
    assert not any("in_groups" in launch.name for launch in device.launches)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_step_that_fills_a_page_summarises_it(dialect: str, dtype: mx.Dtype) -> None:
    """Steps of several tokens, and of one with and without attention."""
    device, geometry = device_of(dialect, "shuffled"), summarised(80, dtype)
    backend = backend_on(device, dialect)
    pages = new_pages(backend, geometry, "fp16", 2)
    table, keys = (3, STRIDE + 2, 7), clustered(768, geometry, 3)
    keys = (keys + 20).astype(dtype)
    ends = [100, 255, 256, 511, 512, 700, 768]
    for before, end in zip([0, *ends], ends, strict=False):
        metadata, step = unpadded((table,), (end,)), keys[None, :, before:end]
        if end == 512:
            backend.attend(pages, step, metadata, Attention(0.1), step=(step, step))
        else:
            pages.write(step, step, metadata)
        for page, entry in enumerate(table):
            begin = page * PAGE_SIZE
            if begin + PAGE_SIZE <= end:
                assert_summarised(pages, entry, keys[:, begin : begin + PAGE_SIZE])
            else:
                assert np.all(summary_words(pages, entry) == 0xFFFF), (end, page)
    assert names(device).count("summarise") == 3
    assert unordered(device.launches) == []


@pytest.mark.parametrize("page_format", ["q8", "q4"])
def test_copies_and_loads_keep_summaries(dialect: str, page_format: str) -> None:
    geometry = summarised(96)
    pages = new_pages(backend_on(device_of(dialect, "shuffled"), dialect), geometry, page_format, 2)
    keys = clustered(512, geometry, 1)
    pages.write(keys[None], keys[None], unpadded(((2, STRIDE + 5),), (512,)))
    expected = [summary_words(pages, entry) for entry in (2, STRIDE + 5)]
    coded = 2 * STRIDE
    pages.copy({2: coded + 1, STRIDE + 5: 4})
    pages.copy({coded + 1: coded + 7})
    pages.copy({coded + 7: STRIDE + 9})
    for entry in (coded + 1, coded + 7, STRIDE + 9):
        assert np.array_equal(summary_words(pages, entry), expected[0])
    assert np.array_equal(summary_words(pages, 4), expected[1])
    pages.load({coded + 3: pages.page(coded + 7) + 0, 8: pages.page(4) + 0})
    assert np.array_equal(summary_words(pages, coded + 3), expected[0])
    assert np.array_equal(summary_words(pages, 8), expected[1])
    assert np.all(summary_words(pages, 9) == 0xFFFF)
