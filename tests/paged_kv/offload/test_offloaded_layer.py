"""One layer with pages out of memory, on each backend, against attention in float64."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from paged_kv import PagedKVCache, PagePool, PoolExhausted
from paged_kv import Sequence as PagedSequence
from paged_kv.allocator.block_allocator import BlockTable
from paged_kv.allocator.requantisation import FullBlock
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, LayerGeometry
from paged_kv.offload import offloaded_layer
from paged_kv.offload.offloaded_layer import RANKED_STEPS, OffloadedLayer
from paged_kv.offload.offloading import OFFLOADED, RECENT_PAGES, Offloading, OldestOffloaded
from tests.support.arrays import normal, numbers
from tests.support.attention_metadata import unpadded
from tests.support.backends import BACKENDS, backend_named
from tests.support.dense_attention import dense_attention
from tests.support.gpu_pages import backend_on, device_of, needs_compiler

STRIDE = 32
HEADS, GROUP, DIM = 2, 2, 64
READ = 1024
PAGES, LATEST = 12, 100
OUT = range(1, 8)  # the pages of a sequence that are out of memory
FRAMES = 3
SCALE = DIM**-0.5
TOLERANCES = {mx.float32: 1e-4, mx.float16: 2e-2}


def geometry_of(dtype: mx.Dtype) -> LayerGeometry:
    return LayerGeometry(HEADS, DIM, dtype, HEADS, DIM, dtype, has_summaries=True)


GEOMETRY = geometry_of(mx.float32)


class Frame:
    """A block for fetched pages."""

    def __init__(self, entry: int) -> None:
        self.blocks = [entry]


class OneLayer:
    """Sequences of 12 pages and 100 tokens, pages 1 to 7 of which are out of memory. The keys of a
    page are alike, so that a query finds them."""

    def __init__(self, backend: Backend, folder: Path, rows: int = 1, frames: int = FRAMES) -> None:
        # Kernels of GPUs are for 16 bits.
        self.dtype = mx.float16 if isinstance(backend, GpuBackend) else mx.float32
        self.offloading = Offloading(folder, FP16, READ, waits=True)
        entries = [Frame(2 * STRIDE + at) for at in range(frames)]
        self.offloading.frames = cast(list[BlockTable], entries)
        geometry = geometry_of(self.dtype)
        self.pages = OffloadedLayer(geometry, backend, STRIDE, READ, self.offloading)
        for slab, page_format in enumerate((FP16, OFFLOADED, FP16)):
            self.pages.map_slab(slab, STRIDE, page_format)
        self.length = PAGES * PAGE_SIZE + LATEST
        self.centres = normal((rows, HEADS, PAGES + 1, DIM), self.dtype, 1)
        own = normal((rows, HEADS, self.length, DIM), self.dtype, 2)
        self.keys = mx.repeat(self.centres, PAGE_SIZE, axis=2)[:, :, : self.length] + 0.3 * own
        self.values = normal(self.keys.shape, self.dtype, 3)
        moves: dict[int, int] = {}
        tables = []
        for row in range(rows):
            table = [(PAGES + 1) * row + at for at in range(PAGES + 1)]
            each = slice(row, row + 1)
            metadata = unpadded((tuple(table),), (self.length,))
            self.pages.write(self.keys[each], self.values[each], metadata)
            for page in OUT:
                moves[table[page]] = STRIDE + len(moves)
                table[page] = moves[table[page]]
            tables.append(tuple(table))
        self.pages.copy(moves)
        self.tables = tuple(tables)

    def like(self, page: int) -> mx.array:
        """Queries [B, heads, 1, dim] that find the keys of a page."""
        return mx.repeat(2 * self.centres[:, :, page : page + 1], GROUP, axis=1)

    def metadata(self) -> AttentionMetadata:
        return unpadded(self.tables, (self.length,) * len(self.tables))

    def attend(self, queries: mx.array, attention: Attention | None = None) -> mx.array:
        attention = attention or Attention(SCALE, read_tokens=READ)
        return self.pages.attend(queries, self.metadata(), attention)

    def assert_attends(
        self, found: mx.array, queries: mx.array, first_row: int = 0, **options: Any
    ) -> None:
        """Compare with attention in float64."""
        settings = {"scale": SCALE, "causal": True, "window": None, "sinks": None, **options}
        for row, (own, given) in enumerate(zip(found, queries, strict=True), first_row):
            sides = map(numbers, (given, self.keys[row], self.values[row]))
            wanted = dense_attention(*sides, **settings)
            assert np.abs(numbers(own) - wanted).max() < TOLERANCES[self.dtype], row


@pytest.fixture(
    params=[
        *BACKENDS,
        pytest.param("emulated-metal", marks=[needs_compiler, pytest.mark.slow]),
    ]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "emulated-metal":
        return backend_on(device_of("metal"), "metal")
    return backend_named(request.param, GEOMETRY)


@pytest.mark.slow
def test_the_pages_that_weigh_most_are_fetched(backend: Backend, tmp_path: Path) -> None:
    layer = OneLayer(backend, tmp_path, 2, FRAMES * 2)
    for step in range(2 * RANKED_STEPS):
        page = OUT[step // RANKED_STEPS]
        queries = layer.like(page)
        layer.assert_attends(layer.attend(queries), queries)
    assert 2 * 2 <= layer.offloading.pages_fetched <= 2 * FRAMES * 2
    assert layer.offloading.pages_late == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 3.0}, {"sinks": [0.5, 9.0, -1.0, 30.0]}, {"window": 2000}, {"causal": False}],
)
@pytest.mark.slow
def test_steps_that_read_all_are_exact(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where pieces have one page."""
    monkeypatch.setattr(offloaded_layer, "SCORE_BYTES", 1)
    layer = OneLayer(backend_named("plain", GEOMETRY), tmp_path)
    queries = normal((1, HEADS * GROUP, 5, DIM), mx.float32, 5)
    options = {each: _array(value) for each, value in options.items()}
    found = layer.attend(queries, Attention(SCALE, **options))
    if "sinks" in options:
        options["sinks"] = numbers(options["sinks"])
    layer.assert_attends(found, queries, **options)


def _array(value: Any) -> Any:
    return mx.array(value) if isinstance(value, list) else value


def test_queries_of_a_batch_have_padding(backend: Backend, tmp_path: Path) -> None:
    layer = OneLayer(backend, tmp_path, 2)
    queries = normal((2, HEADS * GROUP, 3, DIM), layer.dtype, 5)
    metadata = AttentionMetadata(layer.tables, (layer.length,) * 2, (0, 2))
    found = layer.pages.attend(queries, metadata, Attention(SCALE))
    layer.assert_attends(found[:1], queries[:1])
    layer.assert_attends(found[1:, :, :1], queries[1:, :, :1], 1)


def test_contents_come_back_as_they_were(backend: Backend, tmp_path: Path) -> None:
    layer = OneLayer(backend, tmp_path)
    keys, values = layer.pages.gather(layer.metadata())
    assert mx.array_equal(keys, layer.keys)
    assert mx.array_equal(values, layer.values)
    (table,) = layer.tables
    back = dict(zip(table[1:8], range(20, 27), strict=True))
    layer.pages.copy(back)
    layer.tables = (_with(table, back),)
    assert mx.array_equal(layer.pages.gather(layer.metadata())[0], layer.keys)
    queries = layer.like(3)
    layer.assert_attends(layer.attend(queries), queries)


def _with(table: Sequence[int], moves: dict[int, int]) -> tuple[int, ...]:
    return tuple(moves.get(entry, entry) for entry in table)


def test_the_file_has_no_more_than_what_is_out_of_memory(tmp_path: Path) -> None:
    layer = OneLayer(backend_named("plain", GEOMETRY), tmp_path)
    file = layer.offloading.file
    of_page = file.nbytes // len(OUT)
    assert file.nbytes == of_page * len(OUT)
    moves = {layer.tables[0][page]: STRIDE + 20 + page for page in OUT}
    layer.pages.copy(moves)  # moves what is outside
    assert file.nbytes == of_page * len(OUT)
    layer.tables = (_with(layer.tables[0], moves),)
    assert mx.array_equal(layer.pages.gather(layer.metadata())[0], layer.keys)
    layer.pages.unmap_slab(1)
    assert file.nbytes == 0


def test_the_oldest_pages_go_first_and_the_first_and_latest_stay() -> None:
    blocks = [
        FullBlock(at, "q4" if at % 2 else "fp16", is_first=at == 0, age=9 - at) for at in range(10)
    ]
    blocks.append(FullBlock(10, "q8", is_first=False, age=99))
    (*found,) = OldestOffloaded("q4").requantisations(blocks[::-1], 1.0)
    assert [each.block for each in found] == list(range(1, 10 - RECENT_PAGES))
    assert {each.page_format for each in found} == {"offloaded"}


def test_pages_that_do_not_all_fit_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are reserved one by one, so that the first may go out of memory for the last."""
    pool = PagePool(1, max_bytes=12 << 17, read_tokens=768, offload=tmp_path)
    cache = PagedKVCache(pool, 0, [PagedSequence(pool)])
    kv = normal((1, 2, 1500, 64), mx.float16, 1)
    cache.update_and_fetch(kv, kv)
    group = pool.groups[0]
    used = pool.stats().blocks_used
    table = group.allocator.new_table()

    def fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(PoolExhausted, match="No space left"):
        pool.append_blocks(group, table, ["fp16"] * 12)
    assert not table.blocks
    assert pool.stats().blocks_used == used
    pool.check()
