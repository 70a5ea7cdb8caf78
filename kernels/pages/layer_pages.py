"""Reads and writes the pages of one layer, and writes each step late.

A write alone would wait for keys and values, or take a kernel launch of its own. So the attention
call of a step usually writes the step too. Any other call writes the unwritten step first, except a
`gather` of the same batch: it gets the step as `unwritten`.
"""

from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from typing import Any, NamedTuple

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata, Unwritten
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.errors import ThreadConflict
from paged_kv.kernels.pages.layer_memory import LayerMemory, LazyReads, Slab, require_computed
from paged_kv.kernels.pages.page_format import LayerGeometry, PageFormat, PageLayout

# MLX counts the elements of a dimension in 32 bits, and devices limit the size of a buffer.
MAX_SLAB_BYTES = 1 << 31
# A layer has few: of prompts and of decode, and of some masks. Sinks may be new in every step.
KEPT_ATTENTIONS = 8


class _UnwrittenStep(NamedTuple):
    """The unwritten keys and values of a step, and the batch that they belong to."""

    step: Unwritten
    metadata: AttentionMetadata


class NewSlab(NamedTuple):
    """A slab to map; none if it has no pages."""

    slab: int
    pages: int
    page_format: PageFormat


class LayerPages(LayerMemory):
    """The pages of one layer, and the operations on them.

    Attributes:
        read_tokens: see `Attention`; the geometry has summaries then.
        lazy_reads: gathered arrays that may not be computed yet; computed before a page changes.
        attentions: those of `attention`, by its arguments, with the id of the sinks.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        backend: Backend,
        slab_stride: int,
        read_tokens: int | None = None,
    ) -> None:
        super().__init__(geometry, slab_stride)
        self.read_tokens = read_tokens
        self.lazy_reads = LazyReads()
        self.backend = backend
        self._unwritten: _UnwrittenStep | None = None
        self._thread: int | None = None  # that wrote the last step
        self._is_shared = False
        self.attentions: dict[tuple[Any, ...], Attention] = {}

    def like(self, backend: Backend) -> "LayerPages":
        """Pages of the same kind, without slabs."""
        return LayerPages(self.geometry, backend, self.slab_stride, self.read_tokens)

    @property
    def padding_bytes(self) -> int:
        """Bytes of the slabs' memory beyond those of their pages."""
        return len(self.slabs) * self.backend.slab_padding

    @property
    def unwritten(self) -> Unwritten | tuple[()]:
        return () if self._unwritten is None else self._unwritten.step

    def map_slab(self, slab: int, pages: int, page_format: PageFormat) -> None:
        """Add a slab of `pages` pages with undefined contents."""
        if slab in self.slabs:
            self.unmap_slab(slab)  # A step could not be written when it was unmapped.
        layout = PageLayout(page_format, self.geometry)
        memory = self.backend.new_slab(pages, layout.page_units, layout.unit_words)
        self.slabs[slab] = Slab(memory, layout)
        self.memo.clear()

    def unmap_slab(self, slab: int) -> None:
        """Free a slab's memory; ignores a slab that is not mapped."""
        self._write_back_before_unmapping(slab)
        if self.lazy_reads.noted:
            stride = self.slab_stride
            self.lazy_reads.compute_reads_of(lambda entry: entry // stride == slab)
        self.slabs.pop(slab, None)
        self.memo.clear()

    def page(self, entry: int) -> mx.array:
        """A view of one page, uint16 [page_units, unit_words].

        Do not keep it: a later write may show in it, or may have to copy the whole slab.
        """
        self.compute()
        return self.view(entry)

    def write_later(self, keys: mx.array, values: mx.array, metadata: AttentionMetadata) -> None:
        """Write a step, to pages of 16 bits, later: with the attention call of the same `metadata`,
        or before any other.

        It is written at once if the backend does not write in place (a pending read would make a
        later write copy the slab), and if several threads use the pages (no thread can compute
        another's lazy arrays).

        Raises:
            ThreadConflict: see `begin_write`.
        """
        # Not later: until then, reads of the same batch get the step as `unwritten`.
        if self._unwritten is not None or self.lazy_reads.noted or self._thread != get_ident():
            self.begin_write(metadata, keys.shape[2])
        if self._is_shared or not self.backend.writes_in_place:
            self.backend.write(self, keys, values, metadata)
            return
        self.backend.begin(keys, values)
        self._unwritten = _UnwrittenStep((keys, values), metadata)

    def forget_unwritten(self, metadata: AttentionMetadata) -> None:
        """Do not write the unwritten step of this `metadata`, which was undone."""
        if self._unwritten is not None and self._unwritten.metadata is metadata:
            self._unwritten = None

    def begin_write(self, metadata: AttentionMetadata, count: int) -> None:
        """Do what must be done before this thread writes a step of `count` tokens.

        Raises:
            ThreadConflict: see `write_back` and `LazyReads.compute`.
        """
        self._before_change(lambda: metadata.last_entries(count))
        if self._thread != get_ident():
            self._is_shared = self._thread is not None
            self._thread = get_ident()

    def write_back(self) -> None:
        """Write the unwritten step.

        Raises:
            ThreadConflict: another thread made the step and has not computed it yet.
        """
        later = self._unwritten
        if later is not None:
            if self._thread != get_ident():
                require_computed(*later.step)
            self.backend.write(self, *later.step, later.metadata)
            self._unwritten = None

    def write(self, keys: mx.array, values: mx.array, metadata: AttentionMetadata) -> None:
        """See `Backend.write`."""
        self._before_change(lambda: metadata.last_entries(keys.shape[2]))
        self.backend.write(self, keys, values, metadata)

    def load(self, contents: Mapping[int, mx.array]) -> None:
        """See `Backend.load`."""
        self._before_change(lambda: set(contents))
        self.backend.load(self, contents)

    def copy(self, copies: Mapping[int, int]) -> None:
        """See `Backend.copy`."""
        if not copies:
            return
        self._before_change(lambda: set(copies.values()))
        self.backend.copy(self, copies)

    def gather(
        self, metadata: AttentionMetadata, unwritten: Unwritten | None = None
    ) -> tuple[mx.array, mx.array]:
        """See `Backend.gather`."""
        later = self._unwritten
        if later is not None and later.metadata is metadata:
            unwritten = later.step
        else:
            self.write_back()
        return self.backend.gather(self, metadata, unwritten)

    def gather_tokens(
        self, metadata: AttentionMetadata, indices: mx.array
    ) -> tuple[mx.array, mx.array]:
        """See `Backend.gather_tokens`. Writes an unwritten step first."""
        if self._unwritten is not None:
            self.backend.begin(indices)  # computed together with the step
            self.write_back()
        return self.backend.gather_tokens(self, metadata, indices)

    def attention(
        self,
        scale: float,
        causal: bool,
        window: int | None,
        sinks: mx.array | None,
        softcap: float | None,
    ) -> Attention:
        """The layer's `Attention` with these arguments, made at its first step and kept."""
        key = (scale, causal, window, id(sinks), softcap)  # The kept sinks keep their id.
        kept = self.attentions.get(key)
        if kept is None:
            if len(self.attentions) >= KEPT_ATTENTIONS:
                self.attentions.clear()
            kept = Attention(scale, causal, window, sinks, softcap, self.read_tokens)
            self.attentions[key] = kept
        return kept

    def attend(
        self,
        queries: mx.array,
        metadata: AttentionMetadata,
        attention: Attention,
        unwritten: Unwritten | None = None,
        position_queries: mx.array | None = None,
    ) -> mx.array:
        """See `Backend.attend`. Writes the step too if it is written later."""
        later, attend = self._unwritten, self.backend.attend
        if later is None:
            return attend(self, queries, metadata, attention, unwritten, position_queries)
        if later.metadata is not metadata:
            self.write_back()
            return attend(self, queries, metadata, attention, unwritten, position_queries)
        output = attend(self, queries, metadata, attention, None, position_queries, step=later.step)
        self._unwritten = None
        return output

    def compute(self) -> None:
        """Write the unwritten step, and wait for all operations on the pages.

        Raises:
            ThreadConflict: see `write_back`.
        """
        self.write_back()
        self.backend.synchronize(self)

    def settle(self) -> None:
        """Compute what is pending. What MLX has no memory for is forgotten: it belongs to steps
        that were undone, because there was none for them.

        Raises:
            ThreadConflict: another thread has to compute it.
        """
        try:
            self.lazy_reads.compute(set)
            self.backend.synchronize(self)
        except ThreadConflict:
            raise
        except (RuntimeError, MemoryError):
            self.lazy_reads.noted.clear()
            self.backend.forget_pending(self)

    def prepare_moves(self, moves: Mapping[int, int]) -> None:
        """Wait for all that was to be done before page copies (from entry, to entry).

        Raises:
            ThreadConflict: another thread has not yet done its part.
        """
        self._before_change(lambda: set(moves.values()))
        self.backend.synchronize(self)

    def rewrite(self, new: NewSlab, moves: Mapping[int, int], emptied: Iterable[int]) -> None:
        """Map a slab, copy pages (from entry, to entry), and free the memory of emptied slabs."""
        if new.pages:
            self.map_slab(*new)
        self.copy(moves)
        self.backend.synchronize(self)
        for slab in emptied:
            self.unmap_slab(slab)

    def undo_rewrite(
        self, new: NewSlab, moves: Mapping[int, int], emptied: Mapping[int, int]
    ) -> None:
        """Undo as much as `rewrite` has done; `emptied` gives the pages of each emptied slab."""
        lost = {slab: pages for slab, pages in emptied.items() if slab not in self.slabs}
        for slab, pages in lost.items():
            self.map_slab(slab, pages, new.page_format)
        stride = self.slab_stride
        self.copy({to: entry for entry, to in moves.items() if entry // stride in lost})
        self.backend.synchronize(self)
        if new.pages:
            self.unmap_slab(new.slab)

    def _before_change(self, entries: Callable[[], set[int]]) -> None:
        """Write the unwritten step, and compute lazy reads before these entries change."""
        self.write_back()
        self.lazy_reads.compute(entries if self.backend.writes_in_place else set)

    def _write_back_before_unmapping(self, slab: int) -> None:
        """Write an unwritten step that goes to this slab, which holds no used block any more. If
        another thread has not computed the step, drop it: without its page it is of no use."""
        later = self._unwritten
        if later is None:
            return
        entries = later.metadata.last_entries(later.step[0].shape[2])
        if slab in {entry // self.slab_stride for entry in entries}:
            try:
                self.write_back()
            except ThreadConflict:
                self._unwritten = None
