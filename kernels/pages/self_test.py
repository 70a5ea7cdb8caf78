"""Runs single operations of a backend on pages of their own, and compares with plain operations, in
float64 where they attend. A kernel passes this before it is used, and again in `paged-kv doctor`.

All bits of what was not written are set, so that an unwritten slot, or a read of one, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, cycle, islice

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata, Unwritten
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.choice import LEAST_READ_TOKENS
from paged_kv.kernels.pages.errors import is_shortage
from paged_kv.kernels.pages.layer_memory import Slab
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import KEY_FORMATS, WORD
from paged_kv.kernels.pages.page_format import (
    PAGE_SIZE,
    RUN_TOKENS,
    LayerGeometry,
    PageLayout,
    page_format_named,
    summaries_of,
)

STRIDE = 1024
# Tokens of all sequences but the first, and from the 16th on.
OTHERS, LATER = (31, 300), 31
# Pages of a sequence, before it reads the same ones again: a check of long ones takes no more.
DISTINCT = 16
# So many sequences share full pages that a GPU reads them in groups. One more shares all but the
# last of them.
SHARING = 9
WRITTEN = 60  # tokens of a step that is only written, over the end of a page
WINDOW = 200
# Numbers are of size 1; float32 has 24 significant bits, float16 has 11, bfloat16 has 8.
TOLERANCES = {mx.float32: 1e-3, mx.float16: 4e-3, mx.bfloat16: 2e-2}
# The native backend may round queries to bytes for keys of 5 bits: an error of 5.3e-3 here.
ROUNDED_QUERIES = 8e-3
# Summing in another order may round to the neighbouring code. That concerns this share of a page's
# numbers. Where codes become other codes, which rounds twice, it may be so much of numbers.
OTHER_NUMBERS, OTHER_CODES = 1e-3, 0.2

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """One operation on one kind of pages.

    Attributes:
        run: runs the operation and returns the error of its result.
        tolerance: the largest error that passes.
        name: such as "decode in a window q4 bfloat16".
    """

    run: Callable[[], float]
    tolerance: float
    name: str = ""

    def failure(self) -> str | None:
        """What is wrong; None if it passes. Raises as `result`."""
        passed, finding = self.result()
        return None if passed else finding

    def result(self) -> tuple[bool, str]:
        """Whether it passes, and the error or the exception that it raised.

        Raises:
            MemoryError: there was no memory for it, which says nothing of a kernel.
        """
        try:
            error = self.run()
        except Exception as failure:  # of MLX, which compiles a kernel here
            if is_shortage(failure):
                raise MemoryError(f"no memory to check a kernel: {failure}") from failure
            return False, f"{type(failure).__name__}: {failure}"
        return error <= self.tolerance, f"off by {error:.1e}, at most {self.tolerance:.0e}"


def checks(backend: Backend) -> Iterator[Check]:
    """Checks of all operations of a backend, on heads of 128 numbers."""
    for dtype in (mx.float16, mx.bfloat16):
        for name in KEY_FORMATS:
            pages = Probe(LayerGeometry(2, 128, dtype, 2, 128, dtype), tuple({"fp16", name}))
            chosen = replace(pages.with_summaries(), longest=1576, batch=1)
            latent = replace(pages, geometry=LayerGeometry(1, 128, dtype, 1, 64, dtype))
            shared = replace(pages, shares=True)
            calls: list[tuple[str, Check]] = []
            if name == "fp16":
                calls = [("summarise", chosen.summarise(backend)), ("write", pages.write(backend))]
            calls += [
                ("copy", pages.copy(backend)),
                ("gather", pages.gather(backend)),
                ("decode", pages.attend(backend, sinks=dtype)),
                ("decode in a window", pages.attend(backend, window=WINDOW)),
                ("decode behind shared pages", shared.attend(backend, sinks=dtype)),
                ("write and decode", pages.attend(backend, writes=True)),
                ("decode chosen tokens", chosen.attend(backend, read_tokens=LEAST_READ_TOKENS)),
                ("prefill", pages.attend(backend, steps=20, sinks=dtype)),
                ("prefill behind shared pages", shared.attend(backend, steps=3)),
                ("latent decode", latent.attend(backend, is_latent=True)),
                (
                    "latent decode behind shared pages",
                    replace(latent, shares=True).attend(backend, is_latent=True),
                ),
            ]
            for operation, check in calls:
                yield replace(check, name=f"{operation} {name} {str(dtype).rpartition('.')[2]}")


@dataclass(frozen=True)
class Probe:
    """Sequences in pages of one kind, on which operations are tried.

    Attributes:
        geometry: of the pages.
        formats: those of full pages, in turns. Pages that are not full have 16 bits: without that
            format there are none.
        heads: of queries.
        batch: how many sequences there are.
        longest: tokens of the first one.
        shares: whether they share pages. There are `SHARING` and one then.
    """

    geometry: LayerGeometry
    formats: tuple[str, ...] = ("fp16",)
    heads: int = 8
    batch: int = 2
    longest: int = 300
    shares: bool = False

    def on_few_heads(self) -> Probe:
        """The same on at most two KV heads, which take less time and mostly the same kernels."""
        heads = self.geometry.k_heads
        few = min(2, heads)
        geometry = replace(self.geometry, k_heads=few, v_heads=few)
        return replace(self, geometry=geometry, heads=self.heads // heads * few)

    def with_summaries(self) -> Probe:
        """The same in pages with summaries."""
        return replace(self, geometry=replace(self.geometry, has_summaries=True))

    def write(self, backend: Backend) -> Check:
        """Writes a step of several tokens; the error is the share of all words that are not as
        plain operations leave them."""

        # Summaries have a kernel of their own, which may round.
        probe = replace(self, geometry=replace(self.geometry, has_summaries=False))

        def run() -> float:
            ours, theirs = (probe._filled(each) for each in (backend, Backend()))
            step = probe._step(WRITTEN, seed=5)
            for pages in (ours, theirs):
                pages.write(*step, probe._metadata())
            return _different_words(ours, theirs)

        return Check(run, 0)

    def summarise(self, backend: Backend) -> Check:
        """Writes a page; the error is the largest difference of its summaries."""

        def run() -> float:
            pages = replace(self, longest=PAGE_SIZE, batch=1)._filled(backend)
            keys, values = self._numbers(1, PAGE_SIZE, seed=5)
            pages.write(keys, values, AttentionMetadata(((0,),), (PAGE_SIZE,), (0,)))
            words = pages.page(0).reshape(-1)[pages.layout_of(0).summaries_at :]
            expected = _floats(summaries_of(keys[0]))
            return _largest(_floats(words.view(mx.float16)).reshape(expected.shape) - expected)

        return Check(run, self._near)

    def copy(self, backend: Backend) -> Check:
        """Copies pages of each format to each format; the error is the largest difference from
        plain operations, relative to what rounding explains."""
        kinds = len(self.formats)
        probe = replace(self, longest=kinds**2 * PAGE_SIZE, batch=1, shares=False)

        def run() -> float:
            ours, theirs = (probe._filled(each, spare=kinds**2) for each in (backend, Backend()))
            sources = probe._metadata().block_tables[0]
            targets = [at // kinds * STRIDE + kinds**2 + at for at in range(kinds**2)]
            for pages in (ours, theirs):
                pages.copy(dict(zip(sources, targets, strict=True)))
            pairs = zip(sources, targets, strict=True)
            return float(np.max([self._copied_error(ours, theirs, *pair) for pair in pairs]))

        return Check(run, 1)

    def _copied_error(self, ours: LayerPages, theirs: LayerPages, source: int, to: int) -> float:
        layout, pages = theirs.layout_of(to), [each.page(to) for each in (ours, theirs)]
        before = theirs.layout_of(source).page_format.name
        exact = slice(0 if before == layout.page_format.name else layout.summaries_at, None)
        one, other = (np.array(page).reshape(-1) for page in pages)
        if (one[exact] != other[exact]).any():
            return float("inf")
        errors = []
        for found, expected in zip(*map(layout.numbers, pages), strict=True):
            difference = np.abs(_floats(found) - _floats(expected))
            if layout.page_format.name == "fp16":
                errors.append(difference.max() / self._near)
            elif before == "fp16":
                # Not `>`, which is false of what is not a number.
                errors.append(np.mean(~(difference <= self._near)) / OTHER_NUMBERS)
            else:
                errors.append(np.sqrt(np.mean(difference**2, axis=-1)).max() / OTHER_CODES)
        return float(np.max(errors))

    def gather(self, backend: Backend, *, new_tokens: bool = False) -> Check:
        """Gathers all tokens; the error is the largest difference from plain operations."""

        def run() -> float:
            pages, metadata = self._filled(backend), self._metadata(int(new_tokens))
            step = self._step(1, seed=5) if new_tokens else None
            found = backend.gather(pages, metadata, step)
            expected = _plain(pages).gather(metadata, step)
            pairs = zip(found, expected, strict=True)
            return max(_largest(_floats(a) - _floats(b)) for a, b in pairs)

        return Check(run, self._near)

    def attend(
        self,
        backend: Backend,
        *,
        steps: int = 1,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.Dtype | None = None,
        read_tokens: int | None = None,
        writes: bool = False,
        new_tokens: bool = False,
        is_latent: bool = False,
    ) -> Check:
        """Takes a step of `steps` tokens per sequence, which is written, unwritten or neither; the
        error is the largest difference from attention in float64, which MLX computes on the CPU.
        It is infinite if the step was not written as by plain operations."""

        def run() -> float:
            pages, metadata = self._filled(backend), self._metadata(steps * new_tokens)
            dim, dtype = self.geometry.k_dim, self.geometry.k_dtype
            shape, scale = (len(metadata.context_lens), self.heads, steps), dim**-0.5
            queries, positions = _random((*shape, dim), dtype, seed=3), None
            if is_latent:
                positions = _random((*shape, self.geometry.v_dim), dtype, seed=4) * scale
            own_sinks = None if sinks is None else _random((self.heads,), sinks, seed=6)
            attention = Attention(scale, True, window, own_sinks, softcap, read_tokens)
            step = self._step(steps, seed=5)
            unwritten, written = step if new_tokens else None, step if writes else None
            found = backend.attend(
                pages, queries, metadata, attention, unwritten, positions, step=written
            )
            plain = _plain(pages)
            if writes:
                plain = self._filled(Backend())
                plain.write(*step, metadata)
                if _different_words(pages, plain):
                    return float("inf")
            with mx.stream(mx.cpu):
                exact = None if positions is None else positions.astype(mx.float64)
                asked = queries.astype(mx.float64)
                expected = plain.attend(asked, metadata, attention, unwritten, exact)
                return _largest(np.asarray(expected - found.astype(mx.float64)))

        rounds = backend.name == "native" and any(each.startswith("q4") for each in self.formats)
        return Check(run, max(self._near, ROUNDED_QUERIES * rounds))

    @property
    def _near(self) -> float:
        return max(TOLERANCES[self.geometry.k_dtype], TOLERANCES[self.geometry.v_dtype])

    @cached_property
    def _kinds(self) -> list[str]:
        """The format of each slab, 16 bits last."""
        return sorted(self.formats, key="fp16".__eq__)

    @cached_property
    def _tables(self) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], list[int]]:
        """The tables and lengths of all sequences, and the tokens of each page. A page has its
        number in each slab, and is in one of them."""
        tokens: list[int] = []

        def page(length: int) -> int:
            slab = len(tokens) % len(self._kinds) if length == PAGE_SIZE else -1
            tokens.append(length)
            return slab % len(self._kinds) * STRIDE + len(tokens) - 1

        def own(length: int) -> tuple[int, ...]:
            full, rest = divmod(length, PAGE_SIZE)
            distinct = [page(PAGE_SIZE) for _ in range(min(full, DISTINCT))]
            table = [distinct[at % DISTINCT] for at in range(full)]
            return (*table, page(rest)) if rest else tuple(table)

        others = islice(cycle(OTHERS), self.batch - 1)
        lengths = [self.longest, *[n if at < 16 else LATER for at, n in enumerate(others)]]
        if "fp16" not in self._kinds:
            lengths = [-(-length // PAGE_SIZE) * PAGE_SIZE for length in lengths]
        if not self.shares:
            return tuple(map(own, lengths)), tuple(lengths), tokens
        shared = [page(PAGE_SIZE) for _ in range(max(2, len(self._kinds)))]
        last = lengths[-1] % PAGE_SIZE or PAGE_SIZE
        tables = [
            (*shared[: len(shared) - (row == SHARING)], *own(last)) for row in range(SHARING + 1)
        ]
        ends = [PAGE_SIZE * (len(table) - 1) + last for table in tables]
        return tuple(tables), tuple(ends), tokens

    def _metadata(self, unwritten: int = 0) -> AttentionMetadata:
        """Where the tokens are, with so many more that no page holds."""
        tables, lengths, _ = self._tables
        ends = tuple(length + unwritten for length in lengths)
        return AttentionMetadata(tables, ends, (0,) * len(tables))

    def _filled(self, backend: Backend, spare: int = 0) -> LayerPages:
        """Pages that hold numbers, and `spare` more in each slab."""
        tables, _, tokens = self._tables
        keys, values = self._numbers(len(tokens), PAGE_SIZE, seed=1)
        pages = LayerPages(self.geometry, backend, STRIDE)
        for slab, name in enumerate(self._kinds):
            layout = PageLayout(page_format_named(name), self.geometry)
            memory = np.full((len(tokens) + spare, layout.page_words), 0xFFFF, np.uint16)
            for number in {entry % STRIDE for entry in chain(*tables) if entry // STRIDE == slab}:
                own = keys[number : number + 1], values[number : number + 1]
                encoded = layout.page_format.encode(*own)
                for first, plane, words in zip(layout.offsets, layout.planes, encoded, strict=True):
                    written = min(plane.slots, tokens[number])
                    to = memory[number, first : first + plane.words]
                    to.reshape(plane.heads, plane.slots, -1)[:, :written] = words[0, :, :written]
                if self.geometry.has_summaries and tokens[number] == PAGE_SIZE:
                    summaries = summaries_of(own[0]).view(WORD)
                    memory[number, layout.summaries_at :] = np.array(summaries).reshape(-1)
            pages.slabs[slab] = Slab(mx.array(memory.reshape(-1, layout.unit_words)), layout)
        return pages

    def _step(self, count: int, seed: int) -> Unwritten:
        return self._numbers(len(self._tables[0]), count, seed)

    def _numbers(self, rows: int, tokens: int, seed: int) -> Unwritten:
        """Keys and values. With summaries, keys of a run are alike: runs weigh differently."""
        geometry = self.geometry
        shape = rows, geometry.k_heads, tokens, geometry.k_dim
        keys = _random(shape, mx.float32, seed)
        if geometry.has_summaries:
            runs = (rows, geometry.k_heads, -(-tokens // RUN_TOKENS), geometry.k_dim)
            alike = mx.repeat(_random(runs, mx.float32, seed + 20), RUN_TOKENS, axis=2)
            keys = alike[:, :, :tokens] + 0.3 * keys
        values = (rows, geometry.v_heads, tokens, geometry.v_dim)
        return keys.astype(geometry.k_dtype), _random(values, geometry.v_dtype, seed + 10)


def _random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    """Numbers with the variance 1. Normally distributed ones take MLX ten times as long."""
    return mx.random.uniform(-(3**0.5), 3**0.5, shape, key=mx.random.key(seed)).astype(dtype)


def _floats(array: mx.array) -> Numbers:
    return np.asarray(array.astype(mx.float32)).astype(np.float64)


def _largest(numbers: Numbers) -> float:
    """Not `max` of Python, which may hide what is not a number."""
    return float(np.abs(numbers).max())


def _plain(pages: LayerPages) -> LayerPages:
    """The same memory for the plain backend."""
    pages.compute()
    plain = pages.like(Backend())
    plain.slabs = pages.slabs
    return plain


def _different_words(ours: LayerPages, theirs: LayerPages) -> float:
    """The share of the words of all pages that differ."""
    for pages in (ours, theirs):
        pages.compute()
    slabs = zip(ours.slabs.values(), theirs.slabs.values(), strict=True)
    return float(np.mean([np.mean(np.array(a.memory) != np.array(b.memory)) for a, b in slabs]))
