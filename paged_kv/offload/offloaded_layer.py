"""The pages of one layer, of which some are not in memory.

A page that is out of memory keeps a summary of its keys there (`kernels/pages/page_format.py`), and
its contents in a `PageFile`. To the allocator that is one more page format, to which a
`RequantisationPolicy` takes the pages of all layers together.

Each layer fetches pages of its own into frames: blocks that no sequence has. Layers attend to
different pages, so in one step nearly every page matters to some layer, but to one layer few do.

Decode does not know positions. So the pages of a sequence that a layer has in memory, those in
frames included, are a shorter sequence to which kernels attend as to any other, and of which they
choose runs. Every `RANKED_STEPS` steps a layer ranks all pages by their summaries, and fetches the
first of them on other threads: what one step weighs most is what the next ones do. Steps that may
not leave tokens out read all contents from the file, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata, Unwritten
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.choice import chooses, run_scores
from paged_kv.kernels.pages.dense_attention import by_row
from paged_kv.kernels.pages.gather import stacked
from paged_kv.kernels.pages.layer_pages import LayerPages, NewSlab
from paged_kv.kernels.pages.page_format import PAGE_SIZE, LayerGeometry, PageFormat, PageLayout
from paged_kv.offload.offloading import OFFLOADED, Offloading, Place, Words

Tables = tuple[tuple[int, ...], ...]
# A layer ranks its pages at every so many steps.
RANKED_STEPS = 4
# Scores of a piece that are computed at a time, in float32.
SCORE_BYTES = 64 << 20
# Far below any score: where all of a piece is hidden, the next one makes its weights 0.
HIDDEN = -1e30
# The key of a batch's pages that are out of memory in its `memo`.
OUTSIDE = "out of memory"


class _Page(NamedTuple):
    """A page that is out of memory, and the summaries of its keys, float16 [heads, 8, 2 * dim]."""

    place: Place
    summaries: npt.NDArray[np.float16]


class OffloadedLayer(LayerPages):
    """See `LayerPages`; its geometry has summaries."""

    def __init__(
        self,
        geometry: LayerGeometry,
        backend: Backend,
        slab_stride: int,
        read_tokens: int | None,
        offloading: Offloading,
    ) -> None:
        super().__init__(geometry, backend, slab_stride, read_tokens)
        self._offloading = offloading
        self._content_layout = PageLayout(offloading.page_format, geometry)
        self._pages: dict[int, list[_Page | None]] = {}  # of each slab that is out of memory
        # The frame of each fetched page, and the reads that have not come, by serial number.
        self._frames: dict[int, int] = {}
        self._fetches: dict[int, Future[Words]] = {}
        self._wanted: set[int] = set()
        self._steps = 0
        # The block tables of the latest step that chose, and those of what is in memory of them.
        self._shorter: tuple[Tables, Tables] | None = None

    def page_bytes(self, page_format: PageFormat) -> int:
        if page_format != OFFLOADED:
            return super().page_bytes(page_format)
        summaries = self._content_layout.summaries
        assert summaries is not None
        return summaries.words * np.dtype(np.uint16).itemsize

    def layout_of(self, entry: int) -> PageLayout:
        """The layout of a page's contents, wherever they are."""
        return self._content_layout if self._is_outside(entry) else super().layout_of(entry)

    def map_slab(self, slab: int, pages: int, page_format: PageFormat) -> None:
        if page_format == OFFLOADED:
            self._pages[slab] = [None] * pages
        else:
            super().map_slab(slab, pages, page_format)

    def unmap_slab(self, slab: int) -> None:
        for page in self._pages.pop(slab, ()):
            if page is not None:
                self._release(page)
        super().unmap_slab(slab)

    def undo_rewrite(
        self, new: NewSlab, moves: Mapping[int, int], emptied: Mapping[int, int]
    ) -> None:
        if new.page_format != OFFLOADED:
            super().undo_rewrite(new, moves, emptied)
            return
        for slab, pages in emptied.items():
            if slab not in self._pages:
                self.map_slab(slab, pages, OFFLOADED)
        moved = {
            entry: to
            for entry, to in moves.items()
            if self._pages[entry // self.slab_stride][entry % self.slab_stride] is None
        }
        self.copy({to: entry for entry, to in moved.items() if self._is_outside(to)})
        if new.pages:
            self.unmap_slab(new.slab)

    def page(self, entry: int) -> mx.array:
        """See `LayerPages.page`; of a page that is out of memory, a copy.

        Raises:
            OffloadError: it cannot be read.
        """
        if not self._is_outside(entry):
            return super().page(entry)
        return self._as_page(self._offloading.file.read(self._page(entry).place))

    def load(self, contents: Mapping[int, mx.array]) -> None:
        """See `Backend.load`.

        Raises:
            OffloadError: contents of a page that is out of memory cannot be written.
        """
        inside = {}
        for entry, content in contents.items():
            if self._is_outside(entry):
                words = np.array(content).reshape(-1)
                place = self._offloading.file.write(words)
                summaries = self._summaries_in(words, self._content_layout)
                self._keep(entry, _Page(place, summaries.copy()))
            else:
                inside[entry] = content
        if inside:
            super().load(inside)

    def copy(self, copies: Mapping[int, int]) -> None:
        """See `Backend.copy`. Between pages that are out of memory, contents move.

        Raises:
            OffloadError: contents cannot be written or read; pages that were copied stay so.
        """
        self._shorter = None
        inside = {}
        for source, target in copies.items():
            is_outside = self._is_outside(source), self._is_outside(target)
            if all(is_outside):
                self._keep(target, self._page(source))
                self._pages[source // self.slab_stride][source % self.slab_stride] = None
            elif any(is_outside):
                layout = self.layout_of(source)
                self.load({target: layout.recoded(self.page(source), self.layout_of(target))})
            else:
                inside[source] = target
        super().copy(inside)

    def gather(
        self, metadata: AttentionMetadata, unwritten: Unwritten | None = None
    ) -> tuple[mx.array, mx.array]:
        if not self._lacks(metadata):
            return super().gather(metadata, unwritten)
        self.compute()
        rows = [self._whole(metadata, row, unwritten) for row in range(len(metadata.context_lens))]
        keys, values = zip(*rows, strict=True)
        length, padding = max(metadata.ends), metadata.right_padding
        return stacked(length, keys, padding), stacked(length, values, padding)

    def gather_tokens(
        self, metadata: AttentionMetadata, indices: mx.array
    ) -> tuple[mx.array, mx.array]:
        if not self._lacks(metadata):
            return super().gather_tokens(metadata, indices)
        at = indices[:, None, :, None]
        keys, values = self.gather(metadata)
        return mx.take_along_axis(keys, at, axis=2), mx.take_along_axis(values, at, axis=2)

    def attend(
        self,
        queries: mx.array,
        metadata: AttentionMetadata,
        attention: Attention,
        unwritten: Unwritten | None = None,
        position_queries: mx.array | None = None,
    ) -> mx.array:
        """See `Backend.attend`.

        Raises:
            OffloadError: a page cannot be read.
        """
        if not self._lacks(metadata):
            return super().attend(queries, metadata, attention, unwritten, position_queries)
        if position_queries is not None:
            both = mx.concatenate([queries * attention.scale, position_queries], axis=-1)
            of_both = replace(attention, scale=1.0)
            return self._attend_to_all(both, metadata, of_both, self.geometry.k_dim, latent=True)
        if chooses(attention, metadata, queries.shape[2]):
            return self._attend_in_memory(queries, metadata, attention)
        self._steps = 0  # what was fetched for the steps before may matter little to the next one
        return self._attend_to_all(queries, metadata, attention, self.geometry.v_dim)

    def forget_fetches(self) -> None:
        """Forget what is in frames, which are taken away."""
        self._frames.clear()
        self._fetches.clear()
        self._shorter = None
        self._steps = 0

    def _is_outside(self, entry: int) -> bool:
        return entry // self.slab_stride in self._pages

    def _page(self, entry: int) -> _Page:
        found = self._pages[entry // self.slab_stride][entry % self.slab_stride]
        assert found is not None, "nothing was offloaded to this block"
        return found

    def _keep(self, entry: int, page: _Page) -> None:
        slab, at = divmod(entry, self.slab_stride)
        before, self._pages[slab][at] = self._pages[slab][at], page
        if before is not None:
            self._release(before)

    def _release(self, page: _Page) -> None:
        """Give a page's place in the file away: what may be written there is no page of ours."""
        self._fetches.pop(page.place.serial, None)
        self._frames.pop(page.place.serial, None)
        self._offloading.file.release(page.place)

    def _summaries_in(self, words: Words, layout: PageLayout) -> npt.NDArray[np.float16]:
        summaries = words[layout.summaries_at :].view(np.float16)
        return summaries.reshape(self.geometry.k_heads, -1, 2 * self.geometry.k_dim)

    def _as_page(self, words: Words) -> mx.array:
        layout = self._content_layout
        return mx.array(words).reshape(layout.page_units, layout.unit_words)

    def _lacks(self, metadata: AttentionMetadata) -> bool:
        """Whether a batch has pages that are out of memory. They are so in all layers."""
        if OUTSIDE not in metadata.memo:
            outside, stride = self._pages, self.slab_stride
            metadata.memo[OUTSIDE] = bool(outside) and any(
                entry // stride in outside for table in metadata.block_tables for entry in table
            )
        lacks: bool = metadata.memo[OUTSIDE]
        return lacks

    # Steps that choose.

    def _attend_in_memory(
        self, queries: mx.array, metadata: AttentionMetadata, attention: Attention
    ) -> mx.array:
        is_first = not self._steps
        if self._steps % RANKED_STEPS == 0:
            self._fetch(self._ranked(queries, metadata, attention.scale))
        self._steps += 1
        self._take_fetched(wait_for_all=is_first or self._offloading.waits)
        whole = tuple(metadata.block_tables)
        if self._shorter is None or self._shorter[0] != whole:
            self._shorter = whole, tuple([tuple(self._places_in_memory(each)) for each in whole])
        tables = self._shorter[1]
        lengths = [
            length - PAGE_SIZE * (len(table) - len(shorter))
            for length, table, shorter in zip(metadata.context_lens, whole, tables, strict=True)
        ]
        in_memory = AttentionMetadata(tables, tuple(lengths), metadata.right_padding)
        return super().attend(queries, in_memory, attention)

    def _places_in_memory(self, table: tuple[int, ...]) -> Iterator[int]:
        for entry in table:
            if not self._is_outside(entry):
                yield entry
            elif (serial := self._page(entry).place.serial) in self._frames:
                yield self._frame(self._frames[serial])

    def _frame(self, at: int) -> int:
        return self._offloading.frames[at].blocks[0]

    def _ranked(self, queries: mx.array, metadata: AttentionMetadata, scale: float) -> list[_Page]:
        """The pages to have in frames, those of each sequence that weigh most."""
        rows = [
            (row, table[: (length - 1) // PAGE_SIZE])
            for row, (table, length) in enumerate(
                zip(metadata.block_tables, metadata.context_lens, strict=True)
            )
            if any(map(self._is_outside, table))
        ]
        found = []
        most = len(self._offloading.frames) // len(rows)
        for row, full in rows:
            weights = self._weights(queries[row : row + 1], full, scale)
            outside = [at for at, entry in enumerate(full) if self._is_outside(entry)]
            best = sorted(outside, key=lambda at: -weights[at])[:most]
            found += [self._page(full[at]) for at in best]
        return found

    def _weights(
        self, queries: mx.array, full: tuple[int, ...], scale: float
    ) -> npt.NDArray[np.float32]:
        """The expected weight of each of a sequence's full pages, summed over query heads."""
        self.compute()
        summaries = np.stack([self._summaries(entry) for entry in full], axis=1)
        flat = mx.array(summaries.reshape(1, summaries.shape[0], -1, summaries.shape[-1]))
        weights = mx.softmax(run_scores(queries, flat, scale), axis=-1)
        of_pages = mx.unflatten(weights, -1, (len(full), -1)).sum(axis=(0, 1, 2, 4))
        return np.array(of_pages)

    def _summaries(self, entry: int) -> npt.NDArray[np.float16]:
        if self._is_outside(entry):
            return self._page(entry).summaries
        return self._summaries_in(np.array(self.view(entry)).reshape(-1), self.layout_of(entry))

    def _fetch(self, pages: list[_Page]) -> None:
        """Begin to read those of the wanted pages that are in no frame."""
        places = {page.place.serial: page.place for page in pages}
        self._wanted = set(places)
        self._fetches = {
            serial: self._fetches.get(serial) or self._offloading.file.fetch(place)
            for serial, place in places.items()
            if serial not in self._frames
        }

    def _take_fetched(self, *, wait_for_all: bool) -> None:
        """Put pages that have come into frames of pages that are not wanted.

        Raises:
            OffloadError: one could not be read.
        """
        if not self._fetches:
            return
        if wait_for_all:
            wait(self._fetches.values())
        come = [serial for serial, fetch in self._fetches.items() if fetch.done()]
        kept = {at for serial, at in self._frames.items() if serial in self._wanted}
        free = [at for at in range(len(self._offloading.frames)) if at not in kept]
        # Frames without a page go first.
        free.sort(key=lambda at: at in self._frames.values())
        contents = {}
        for serial, at in zip(come, free, strict=False):
            contents[self._frame(at)] = self._as_page(self._fetches[serial].result())
        if contents:
            taken = free[: len(contents)]
            self._frames = {s: at for s, at in self._frames.items() if at not in taken}
            self.load(contents)
            for serial, at in zip(come, taken, strict=False):
                self._frames[serial] = at
                del self._fetches[serial]
            self._shorter = None
        self._offloading.pages_fetched += len(contents)
        self._offloading.pages_late += len(self._fetches)

    # Steps that read all.

    def _attend_to_all(
        self,
        queries: mx.array,
        metadata: AttentionMetadata,
        attention: Attention,
        v_dim: int,
        *,
        latent: bool = False,
    ) -> mx.array:
        self.compute()

        def attend_row(row: int, own: slice) -> mx.array:
            own_queries = queries[row : row + 1, :, own]
            heads, count = own_queries.shape[1:3]
            tokens = SCORE_BYTES // (4 * heads * max(1, count))
            pieces = self._pieces(metadata, row, max(1, tokens // PAGE_SIZE))
            if latent:
                pieces = ((mx.concatenate([*both], axis=-1), both[0]) for both in pieces)
            return attend_streamed(own_queries, pieces, metadata.context_lens[row], attention)

        return by_row(queries, metadata, v_dim, attend_row)

    def _whole(
        self, metadata: AttentionMetadata, row: int, unwritten: Unwritten | None
    ) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, tokens, dim] of a sequence; the last ones as given."""
        pages = len(metadata.block_tables[row])
        keys, values = next(self._pieces(metadata, row, pages))
        if unwritten is None:
            return keys, values
        own = metadata.valid_tokens(unwritten[0].shape[2])[row]
        before = metadata.context_lens[row] - len(own)
        given = [each[row : row + 1, :, own.start : own.stop] for each in unwritten]
        return (
            mx.concatenate([keys[:, :, :before], given[0]], axis=2),
            mx.concatenate([values[:, :, :before], given[1]], axis=2),
        )

    def _pieces(
        self, metadata: AttentionMetadata, row: int, pages: int
    ) -> Iterator[tuple[mx.array, mx.array]]:
        """Keys and values [1, heads, tokens, dim] of so many pages at a time. Those of the next
        piece are read from the file meanwhile."""
        length = metadata.context_lens[row]
        table = metadata.block_tables[row][: -(-length // PAGE_SIZE)]
        parts = [table[first : first + pages] for first in range(0, len(table), pages)]
        coming = self._fetches_of(parts[0])
        for at, part in enumerate(parts):
            fetches = coming
            if at + 1 < len(parts):
                coming = self._fetches_of(parts[at + 1])
            numbers = [self._numbers(entry, fetches) for entry in part]
            keys, values = (mx.concatenate([*each], axis=2) for each in zip(*numbers, strict=True))
            tokens = min(length - at * pages * PAGE_SIZE, len(part) * PAGE_SIZE)
            yield keys[:, :, :tokens], values[:, :, :tokens]

    def _fetches_of(self, entries: Iterable[int]) -> dict[int, Future[Words]]:
        file = self._offloading.file
        return {
            entry: file.fetch(self._page(entry).place)
            for entry in entries
            if self._is_outside(entry)
        }

    def _numbers(
        self, entry: int, fetches: Mapping[int, Future[Words]]
    ) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, 256, dim] of a page."""
        if entry not in fetches:
            return self.layout_of(entry).numbers(self.view(entry))
        self._offloading.pages_fetched += 1
        return self._content_layout.numbers(self._as_page(fetches[entry].result()))


def attend_streamed(
    queries: mx.array,
    pieces: Iterable[tuple[mx.array, mx.array]],
    length: int,
    attention: Attention,
) -> mx.array:
    """Attention [1, q_heads, S, v_dim] of the last S of `length` tokens, computed in float32.

    Keys and values come piece by piece, so that not all are in memory at a time. The maximum of
    each query's scores and the sum of its weights so far are enough to add the next piece: Milakov
    and Gimelshein, "Online normalizer calculation for softmax", 2018.

    Args:
        queries: [1, q_heads, S, k_dim].
        pieces: keys [1, kv_heads, tokens, k_dim] and values [1, kv_heads, tokens, v_dim], in the
            order of tokens.
        length: tokens of the sequence.
        attention: see `Attention`; `read_tokens` is not asked.
    """
    count, first = queries.shape[2], 0
    grouped, maximum, total, sums = queries, mx.array(HIDDEN), mx.array(0.0), mx.array(0.0)
    position = mx.arange(length - count, length)[:, None]
    for keys, values in pieces:
        if not first:
            scaled = queries.astype(mx.float32) * attention.scale
            grouped = mx.unflatten(scaled, 1, (keys.shape[1], -1))
            if attention.sinks is not None:
                shape = (1, *grouped.shape[1:3], 1, 1)
                maximum = attention.sinks.astype(mx.float32).reshape(shape)
                total = mx.ones_like(maximum)
        scores = grouped @ keys[:, :, None].astype(mx.float32).swapaxes(-1, -2)
        if attention.softcap is not None:
            scores = attention.softcap * mx.tanh(scores / attention.softcap)
        if attention.hides_later:
            at = mx.arange(first, first + keys.shape[2])
            seen = at <= position
            if attention.window is not None:
                seen = seen & (at > position - attention.window)
            scores = mx.where(seen, scores, HIDDEN)
        highest = mx.maximum(maximum, scores.max(axis=-1, keepdims=True))
        weights, kept = mx.exp(scores - highest), mx.exp(maximum - highest)
        total = total * kept + weights.sum(axis=-1, keepdims=True)
        sums = sums * kept + weights @ values[:, :, None].astype(mx.float32)
        maximum = highest
        mx.eval(maximum, total, sums)
        first += keys.shape[2]
    return mx.flatten(sums / total, 1, 2).astype(queries.dtype)
