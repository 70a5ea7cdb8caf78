"""Steps that read chosen tokens on GPU kernels, with every access checked, beside plain operations.

Both choose by summaries of the same keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from paged_kv.kernels.gpu import tuning
from paged_kv.kernels.pages import prefix_groups
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import PAGE_SIZE, page_format_named
from paged_kv.kernels.pages.summaries import summaries_of
from paged_kv.kernels.plain.plain_backend import PlainBackend
from tests.support.arrays import normal, numbers
from tests.support.attention_metadata import unpadded
from tests.support.gpu_on_cpu.emulated import Device
from tests.support.gpu_on_cpu.launch_order import unordered
from tests.support.gpu_pages import (
    ALL_DIALECTS,
    TOLERANCES,
    Separately,
    backend_on,
    device_of,
    needs_compiler,
    same,
)
from tests.support.grids import plain_only

pytestmark = [needs_compiler, pytest.mark.parametrize("dialect", ALL_DIALECTS)]

STRIDE = 16
ORDERS = ("forward", "reverse", "shuffled")
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


def clustered(length: int, geometry: LayerGeometry, seed: int) -> mx.array:
    """Keys [heads, length, dim] that stay alike for some tokens, as those of texts do."""
    centres = normal((geometry.k_heads, length // 50 + 1, geometry.k_dim), mx.float32, seed)
    of_tokens = mx.repeat(centres, 50, axis=1)[:, :length]
    own = normal((geometry.k_heads, length, geometry.k_dim), mx.float32, seed + 1)
    return (1.5 * of_tokens + 0.7 * own).astype(geometry.k_dtype)


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
            new_pages(each, self.geometry, page_format, self.slabs)
            for each in (backend, PlainBackend())
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
        """Queries [B, heads * group, 1, dim], each like a key somewhere in the past."""
        rows = []
        for row, keys in enumerate(self.keys):
            at = np.random.default_rng(row).integers(0, keys.shape[1], group)
            alike = mx.flatten(keys[:, mx.array(at)], 0, 1)[:, None]
            rows.append(0.7 * alike + 0.3 * normal(alike.shape, mx.float32, 200 + row))
        return mx.stack(rows).astype(self.geometry.k_dtype)

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
        found = asked.write_and_attend(self.ours, self.step, queries, self.metadata, attention)
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


def summary_words(pages: LayerPages, entry: int) -> npt.NDArray[np.uint16]:
    return np.array(pages.page(entry).reshape(-1)[pages.layout_of(entry).summaries_at :])


def assert_summarised(pages: LayerPages, entry: int, keys: mx.array) -> None:
    """A page's summaries are those of keys [heads, 256, dim], but for rounding."""
    wanted = numbers(summaries_of(keys))
    found = numbers(mx.array(summary_words(pages, entry)).view(mx.float16)).reshape(wanted.shape)
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", plain_only([mx.float16], TOLERANCES))
@pytest.mark.parametrize("separately", [False, True])
def test_rows_of_any_length(dialect: str, dtype: mx.Dtype, separately: bool) -> None:
    """Of several slabs. Some may be read whole, one has a single token."""
    device = device_of(dialect, *ORDERS)
    sides = Sides(backend_on(device, dialect), [1400, 300, 769, 1, 768], summarised(64, dtype))
    assert sides.error(3, separately=separately) <= TOLERANCES[dtype]
    assert "score" in names(device)
    assert unordered(device.launches) == []


@pytest.mark.parametrize("length", plain_only([1025, 1088], [1024, 1025, 1088, 1089, 1280, 1281]))
def test_ends_of_runs_and_pages(dialect: str, length: int) -> None:
    sides = Sides(backend_on(device_of(dialect), dialect), [length])
    assert sides.error() <= TOLERANCES[mx.float16]


@pytest.mark.parametrize("page_format", ["q8", "q4"])
@pytest.mark.parametrize("group", plain_only([4], [1, 4, 9]))
def test_quantised_pages(dialect: str, page_format: str, group: int) -> None:
    backend = backend_on(device_of(dialect), dialect)
    sides = Sides(backend, [1500, 1100], page_format=page_format)
    assert sides.error(group) <= TOLERANCES[mx.float16]


@pytest.mark.parametrize("group", plain_only([9], [5, 9, 16]))
def test_query_heads_that_share_keys(dialect: str, group: int) -> None:
    """More than one block of a threadgroup has rows for, the last partly empty."""
    sides = Sides(backend_on(device_of(dialect), dialect), [1200], summarised(96))
    assert sides.error(group) <= TOLERANCES[mx.float16]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [80, 128, 192, 256, 512])
def test_head_sizes(dialect: str, dim: int) -> None:
    geometry = summarised(dim, heads=1)
    sides = Sides(backend_on(device_of(dialect), dialect), [1200], geometry)
    assert sides.error(5, scale=6.4 / dim) <= TOLERANCES[mx.float16]


def test_sinks_and_softcaps(dialect: str) -> None:
    sides = Sides(backend_on(device_of(dialect), dialect), [1400, 500])
    sinks = normal((4,), mx.float16, 3)
    assert sides.error(sinks=sinks, softcap=5.0) <= TOLERANCES[mx.float16]


def test_chosen_tokens_are_read_in_parts(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST_TOKENS", dict.fromkeys(tuning.LEAST_TOKENS, 4))
    device = device_of(dialect, *ORDERS)
    sides = Sides(backend_on(device, dialect), [1400, 900])
    assert sides.error(sinks=normal((4,), mx.float16, 3)) <= TOLERANCES[mx.float16]
    assert names(device)[-3:] == ["score", "decode", "merge"]


@pytest.mark.parametrize("read_tokens", [800, 1000])
def test_a_number_of_tokens_that_is_no_whole_run(dialect: str, read_tokens: int) -> None:
    """The second sequence has more than whole runs of it hold, and may be read whole."""
    sides = Sides(backend_on(device_of(dialect), dialect), [1400, read_tokens])
    assert sides.error(read_tokens=read_tokens) <= TOLERANCES[mx.float16]


def test_padding_chooses_nothing(dialect: str) -> None:
    sides = Sides(backend_on(device_of(dialect), dialect), [1100, 1000])
    metadata = AttentionMetadata(sides.metadata.block_tables, (1100, 1000), (0, 1))
    queries = sides.queries(2)
    attention = Attention(0.2, read_tokens=READ)
    before = summary_words(sides.ours, metadata.block_tables[1][-1])
    found = numbers(
        sides.ours.backend.write_and_attend(sides.ours, sides.step, queries, metadata, attention)
    )
    sides.theirs.write(*sides.step, metadata)
    expected = numbers(sides.expected(queries, metadata, attention))
    assert np.abs(found[0] - expected[0]).max() <= TOLERANCES[mx.float16]
    assert not found[1].any()
    assert np.array_equal(summary_words(sides.ours, metadata.block_tables[1][-1]), before)


def test_sequences_that_share_pages_choose_for_themselves(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 1)
    device = device_of(dialect)
    sides = Sides(backend_on(device, dialect), [1300, 1290], tables=((0, 1, 2, 3, 4, 5),) * 2)
    arguments = sides.queries(2), sides.metadata.but_latest, Attention(0.2, read_tokens=READ)
    found, expected = sides.ours.attend(*arguments), sides.expected(*arguments)
    assert np.abs(numbers(found) - numbers(expected)).max() <= TOLERANCES[mx.float16]
    assert not any("in_groups" in launch.name for launch in device.launches)


def test_what_may_be_read_whole_takes_the_same_launches(dialect: str) -> None:
    device = device_of(dialect)
    sides = Sides(backend_on(device, dialect), [900, 300])
    queries, metadata = sides.queries(2), sides.metadata.but_latest
    several = mx.repeat(queries, 3, axis=2)
    outputs = []
    for read_tokens in (None, 899, 768):
        for window in (None, 800):
            for asked in (queries, several):
                attention = Attention(0.2, window=window, read_tokens=read_tokens)
                before = len(device.launches)
                output = sides.ours.attend(asked, metadata, attention)
                outputs.append((numbers(output).tobytes(), names(device)[before:]))
    exact, whole, chosen = (outputs[at : at + 4] for at in (0, 4, 8))
    assert exact == whole
    assert exact[1:] == chosen[1:]
    assert chosen[0][1][0] == "score"


@pytest.mark.parametrize("dtype", plain_only([mx.float16], TOLERANCES))
def test_the_step_that_fills_a_page_summarises_it(dialect: str, dtype: mx.Dtype) -> None:
    """Steps of several tokens, and of one with and without attention."""
    device, geometry = device_of(dialect, *ORDERS), summarised(80, dtype)
    backend = backend_on(device, dialect)
    pages = new_pages(backend, geometry, "fp16", 2)
    table, keys = (3, STRIDE + 2, 7), clustered(768, geometry, 3)
    keys = (keys + 20).astype(dtype)
    ends = [100, 255, 256, 511, 512, 700, 768]
    for before, end in zip([0, *ends], ends, strict=False):
        metadata, step = unpadded((table,), (end,)), keys[None, :, before:end]
        if end == 512:
            backend.write_and_attend(pages, (step, step), step, metadata, Attention(0.1))
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


def test_numbers_beyond_float16_are_summarised_by_the_largest(dialect: str) -> None:
    geometry = summarised(dtype=mx.bfloat16)
    pages = new_pages(backend_on(device_of(dialect), dialect), geometry, "fp16", 1)
    keys = 1e6 * clustered(256, geometry, 1)[None]
    pages.write(keys, keys, unpadded(((2,),), (256,)))
    words = numbers(mx.array(summary_words(pages, 2)).view(mx.float16))
    assert (words.min(), words.max()) == (-65504, 65504)


@pytest.mark.parametrize("page_format", ["q8", "q4"])
def test_copies_and_loads_keep_summaries(dialect: str, page_format: str) -> None:
    geometry = summarised(96)
    pages = new_pages(backend_on(device_of(dialect, *ORDERS), dialect), geometry, page_format, 2)
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


@pytest.mark.slow
def test_little_is_loaded_of_a_long_context(dialect: str) -> None:
    """1,024 of 16,384 tokens, and all summaries: at most a quarter of what exact attention does."""
    device = device_of(dialect)
    geometry = summarised(128, heads=1)
    sides = Sides(backend_on(device, dialect), [16384], geometry)
    loads = []
    for read_tokens in (None, 1024):
        before = len(device.launches)
        attention = Attention(0.1, read_tokens=read_tokens)
        sides.ours.attend(sides.queries(4), sides.metadata.but_latest, attention)
        loads.append(
            sum(slab.loads for launch in device.launches[before:] for slab in launch.slabs)
        )
    exact, chosen = loads
    assert chosen * 4 <= exact
