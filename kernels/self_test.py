"""Runs every kernel of a backend once on this device, and compares with plain operations, in
float64 where it attends.

All bits of the pages are set at first, so that an unwritten slot, or a read of one, shows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.backends import backend_for
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.choice import LEAST_READ_TOKENS
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import KEY_FORMATS, WORD
from paged_kv.kernels.pages.page_format import (
    FP16,
    PAGE_SIZE,
    RUN_TOKENS,
    LayerGeometry,
    page_format_named,
    summaries_of,
)

KV_HEADS, HEADS, DIM, WINDOW = 2, 8, 128, 200
SCALE = DIM**-0.5
POSITIONS = 64  # numbers of a position key, behind latents of DIM
STRIDE, SLAB_PAGES = 8, 3
LENGTHS = (300, 31)
WRITTEN = ((1, 0), (2,))
# The first page is full, and so in the format that is tested: the first page of the next slab.
RECODED = ((STRIDE, 0), (2,))
# So many sequences share both pages of the first one that a GPU reads them in groups. One more
# shares the first page, and then has its own.
SHARING = 9
# A context of seven pages, of which a step reads chosen tokens.
CHOSEN_PAGES = 7
CHOSEN_LENGTH = (CHOSEN_PAGES - 1) * PAGE_SIZE + 40
# Numbers are of size 1; float16 has 11 significant bits, bfloat16 has 8.
TOLERANCES = {mx.float16: 4e-3, mx.bfloat16: 2e-2}
# The native backend may round queries to bytes for keys of 4 bits: an error of 5.3e-3 here.
ROUNDED_QUERIES = 8e-3
# Share of a page's bytes: summing in another order may round to the neighbouring code.
OTHER_BYTES = 1e-4

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """One operation on one kind of pages.

    Attributes:
        operation: its name, such as "decode in a window".
        pages: their format and dtype, such as "q4 bfloat16".
        run: runs the operation and returns the error of its result.
        tolerance: the largest error that passes.
    """

    operation: str
    pages: str
    run: Callable[[], float]
    tolerance: float

    @property
    def name(self) -> str:
        return f"{self.operation} {self.pages}"


def checks(backend: Backend) -> Iterator[Check]:
    """All checks of a backend. Each check makes its own pages."""
    for dtype, near in TOLERANCES.items():
        for page_format in KEY_FORMATS:
            test = _Test(
                backend, page_format, LayerGeometry(KV_HEADS, DIM, dtype, KV_HEADS, DIM, dtype)
            )
            latent = _Test(backend, page_format, LayerGeometry(1, DIM, dtype, 1, POSITIONS, dtype))
            choice = _ChoiceTest(test)
            rounds = backend.name == "native" and page_format == "q4"
            decoded = max(near, ROUNDED_QUERIES) if rounds else near
            is_fp16 = page_format == "fp16"
            operations: list[tuple[str, Callable[[], float], float]] = [
                *([("summarise", choice.summarise, near)] if is_fp16 else []),
                ("write", test.write, 0) if is_fp16 else ("recode", test.write, OTHER_BYTES),
                ("decode", test.decode, decoded),
                ("decode in a window", partial(test.decode, WINDOW), decoded),
                ("write and decode", test.write_and_decode, decoded),
                ("decode chosen tokens", choice.decode, decoded),
                ("prefill", test.prefill, decoded),
                ("gather", test.gather, near),
                ("latent decode", latent.decode, near),
                ("copy", test.copy, 0),
                ("convert", test.convert, 0.15),
            ]
            pages = f"{page_format} {str(dtype).rpartition('.')[2]}"
            for operation, run, tolerance in operations:
                yield Check(operation, pages, run, tolerance)


class _Test:
    """Full pages of one format and the pages that are written after them, by the backend and by
    plain operations for comparison."""

    def __init__(self, backend: Backend, page_format: str, geometry: LayerGeometry) -> None:
        self.backend, self.page_format, self.geometry = backend, page_format, geometry
        self.is_latent = geometry.v_dim == POSITIONS
        self.sinks = None if self.is_latent else self._normal((HEADS,), seed=4)
        self.tables = WRITTEN if page_format == "fp16" else RECODED
        self.metadata = AttentionMetadata(self.tables, LENGTHS, (0,) * len(LENGTHS))
        (first, second), (other,) = self.tables
        shared = AttentionMetadata(
            ((first, second),) * SHARING + ((first, other),),
            (LENGTHS[0],) * SHARING + (PAGE_SIZE + LENGTHS[1],),
            (0,) * (SHARING + 1),
        )
        self.batches = self.metadata, shared

    def write(self) -> float:
        """The share of bytes that differ from those of plain operations."""
        ours, theirs = (
            np.concatenate([np.array(pages.page(page)).reshape(-1) for page in chain(*self.tables)])
            for pages in (self._written(self.backend), self._written(Backend()))
        )
        return float(np.mean(ours.view(np.uint8) != theirs.view(np.uint8)))

    def decode(self, window: int | None = None) -> float:
        """The largest difference of steps of one token from attention in float64. Those of latents
        have position queries."""
        # Not `max` of Python, which may hide what is not a number.
        return float(np.max([self._attend(batch, 1, window) for batch in self.batches]))

    def prefill(self) -> float:
        """The largest difference of steps of several tokens, as of drafts behind shared pages."""
        counts = zip(self.batches, (20, 3), strict=True)
        return float(np.max([self._attend(batch, count, None) for batch, count in counts]))

    def _attend(self, metadata: AttentionMetadata, count: int, window: int | None) -> float:
        pages, batch = self._written(self.backend), len(metadata.context_lens)
        queries = self._normal((batch, HEADS, count, DIM), seed=3)
        positions = None
        if self.is_latent:
            positions = self._normal((batch, HEADS, count, POSITIONS), seed=5) * SCALE
        attention = Attention(SCALE, window=window, sinks=self.sinks)
        found = pages.attend(queries, metadata, attention, None, positions)
        return _error(found, pages, queries, metadata, attention, positions)

    def write_and_decode(self) -> float:
        """The largest difference from float64 after a kernel that writes one more token and attends
        in one launch. Plain operations write the same token to the expected pages."""
        pages, expected = self._written(self.backend), self._written(Backend())
        batch = len(LENGTHS)
        longer = tuple(length + 1 for length in LENGTHS)
        metadata = AttentionMetadata(self.tables, longer, (0,) * batch)
        queries = self._normal((batch, HEADS, 1, DIM), seed=3)
        keys, values = (self._normal((batch, KV_HEADS, 1, DIM), seed=seed) for seed in (5, 6))
        expected.write(keys, values, metadata)
        pages.write_later(keys, values, metadata)
        attention = Attention(SCALE, sinks=self.sinks)
        found = pages.attend(queries, metadata, attention)
        return _error(found, expected, queries, metadata, attention)

    def gather(self) -> float:
        """The largest difference from the result of plain operations."""
        pages = self._written(self.backend)
        pairs = zip(pages.gather(self.metadata), _plain(pages).gather(self.metadata), strict=True)
        return float(np.max([np.abs(_numbers(a) - _numbers(b)).max() for a, b in pairs]))

    def copy(self) -> float:
        """The number of bytes of a copy that differ."""
        pages = self._written(self.backend)
        pages.load({STRIDE: mx.random.randint(0, 1 << 16, pages.page(STRIDE).shape).astype(WORD)})
        pages.copy({STRIDE: STRIDE + 1})
        return float(np.sum(np.array(pages.page(STRIDE)) != np.array(pages.page(STRIDE + 1))))

    def convert(self) -> float:
        """The largest change of a number when a page is converted to another format, relative to
        the largest number."""
        pages, source = self._written(self.backend), self.tables[0][0]
        pages.copy({source: 2 * STRIDE})
        metadata = AttentionMetadata(((source,), (2 * STRIDE,)), (256, 256), (0, 0))
        before, after = _numbers(_plain(pages).gather(metadata)[0])
        return float(np.abs(before - after).max() / np.abs(before).max())

    def _written(self, backend: Backend) -> LayerPages:
        """Pages in three slabs: written ones, those of the format, and those of another one."""
        pages = LayerPages(self.geometry, backend_for(backend, self.geometry), STRIDE)
        other = "q8" if self.page_format == "fp16" else "fp16"
        for slab, name in enumerate(("fp16", self.page_format, other)):
            pages.map_slab(slab, SLAB_PAGES, page_format_named(name))
            first = slab * STRIDE
            unset = mx.full(pages.page(first).shape, 0xFFFF, dtype=WORD)
            pages.load(dict.fromkeys(range(first, first + SLAB_PAGES), unset))
        shape = (len(LENGTHS), self.geometry.k_heads, max(LENGTHS))
        keys = self._normal((*shape, self.geometry.k_dim), seed=1)
        values = self._normal((*shape, self.geometry.v_dim), seed=2)
        pages.write(keys, values, AttentionMetadata(WRITTEN, LENGTHS, (0,) * len(LENGTHS)))
        if self.tables != WRITTEN:
            pages.copy({1: STRIDE})
        return pages

    def _normal(self, shape: tuple[int, ...], seed: int) -> mx.array:
        return _normal(shape, self.geometry.k_dtype, seed)


class _ChoiceTest:
    """A sequence in pages with summaries, of the backend and the format of another test."""

    def __init__(self, test: _Test) -> None:
        self.backend, self.page_format = test.backend, test.page_format
        self.geometry = replace(test.geometry, has_summaries=True)
        # Keys of a run are alike, so that runs weigh differently.
        runs = _normal((1, KV_HEADS, CHOSEN_LENGTH // RUN_TOKENS + 1, DIM), mx.float32, seed=1)
        shape, dtype = (1, KV_HEADS, CHOSEN_LENGTH, DIM), self.geometry.k_dtype
        own = 0.3 * _normal(shape, mx.float32, seed=2)
        self.keys = (mx.repeat(runs, RUN_TOKENS, axis=2)[:, :, :CHOSEN_LENGTH] + own).astype(dtype)
        self.values = _normal(shape, dtype, seed=3)

    def summarise(self) -> float:
        """The largest difference of a full page's summaries from those of plain operations."""
        pages, (first, *_) = self._written()
        words = pages.page(first).reshape(-1)[pages.layout_of(first).summaries_at :]
        expected = _numbers(summaries_of(self.keys[0, :, :PAGE_SIZE]))
        found = _numbers(words.view(mx.float16)).reshape(expected.shape)
        return float(np.abs(found - expected).max())

    def decode(self) -> float:
        """The largest difference of a step that chooses tokens, and is written too, from plain
        operations in float64 on the same pages."""
        pages, table = self._written()
        metadata = AttentionMetadata((table,), (CHOSEN_LENGTH,), (0,))
        queries = _normal((1, HEADS, 1, DIM), self.geometry.k_dtype, seed=4)
        attention = Attention(SCALE, read_tokens=LEAST_READ_TOKENS)
        pages.write_later(self.keys[:, :, -1:], self.values[:, :, -1:], metadata)
        found = pages.attend(queries, metadata, attention)
        return _error(found, pages, queries, metadata, attention)

    def _written(self) -> tuple[LayerPages, tuple[int, ...]]:
        """Pages of all tokens but the last, and their table: full pages in the format."""
        pages = LayerPages(self.geometry, backend_for(self.backend, self.geometry), STRIDE)
        pages.map_slab(0, CHOSEN_PAGES, FP16)
        table, before = tuple(range(CHOSEN_PAGES)), slice(CHOSEN_LENGTH - 1)
        metadata = AttentionMetadata((table,), (CHOSEN_LENGTH - 1,), (0,))
        pages.write(self.keys[:, :, before], self.values[:, :, before], metadata)
        if self.page_format == "fp16":
            return pages, table
        pages.map_slab(1, CHOSEN_PAGES, page_format_named(self.page_format))
        *full, last = table
        pages.copy({entry: STRIDE + entry for entry in full})
        return pages, (*[STRIDE + entry for entry in full], last)


def _normal(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _numbers(array: mx.array) -> Numbers:
    return np.asarray(array.astype(mx.float32)).astype(np.float64)


def _plain(pages: LayerPages) -> LayerPages:
    """The same memory for the plain backend."""
    pages.compute()
    plain = pages.like(Backend())
    plain.slabs = pages.slabs
    return plain


def _error(
    found: mx.array,
    pages: LayerPages,
    queries: mx.array,
    metadata: AttentionMetadata,
    attention: Attention,
    positions: mx.array | None = None,
) -> float:
    """The largest difference of what was found from attention in float64 to the pages, which MLX
    computes on the CPU."""
    plain = _plain(pages)
    with mx.stream(mx.cpu):
        exact = None if positions is None else positions.astype(mx.float64)
        asked = queries.astype(mx.float64)
        expected = plain.attend(asked, metadata, attention, None, exact)
        return float(mx.abs(expected - found.astype(mx.float64)).max())
