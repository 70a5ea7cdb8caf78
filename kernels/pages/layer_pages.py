"""The pages of one layer: its slabs, and the operations on them.

A step is mostly written by the attention that reads it: a write alone would wait for keys and
values, or be a launch of its own. Until then the pages are owed it. Whatever else is asked of them
writes it first, and arrays that stand for these rows, and are made before, get it as a tail.
"""

from collections.abc import Callable, Mapping
from threading import get_ident
from typing import NamedTuple

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, Tail
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.errors import ThreadConflict
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_memory import LayerMemory, Slab
from paged_kv.kernels.pages.lazy_reads import LazyReads
from paged_kv.kernels.pages.number_format import Quantised
from paged_kv.kernels.pages.page_format import PageFormat, PageLayout

# MLX counts the elements of a dimension in 32 bits, and devices limit the size of a buffer.
MAX_SLAB_BYTES = 1 << 31


class _DeferredWrite(NamedTuple):
    """The keys and values of a step that ends these rows, and that no page holds yet."""

    step: Tail
    rows: AttentionMetadata


class LayerPages(LayerMemory):
    """The pages of one layer, and the operations on them.

    Args:
        geometry: what the layer writes.
        backend: who writes and reads its pages.
        slab_stride: a table entry is slab * slab_stride + page.

    Attributes:
        lazy_reads: what was read from the pages and may not be computed yet. It is computed
            before a page changes.
    """

    def __init__(self, geometry: LayerGeometry, backend: Backend, slab_stride: int) -> None:
        super().__init__(geometry, slab_stride)
        self.lazy_reads = LazyReads()
        self._backend = backend
        self._deferred: _DeferredWrite | None = None
        self._thread: int | None = None  # that came last with a step
        self._is_shared = False

    @property
    def backend_name(self) -> str:
        return self._backend.name

    def map_slab(self, slab: int, pages: int, page_format: PageFormat) -> None:
        """Add a slab of `pages` pages; their contents are not defined."""
        layout = PageLayout(page_format, self.geometry)
        memory = self._backend.new_slab(pages, layout.page_units, layout.unit_words)
        self.slabs[slab] = Slab(memory, layout)
        self.memo.clear()

    def unmap_slab(self, slab: int) -> None:
        """Give a slab's memory back; one that was not mapped is ignored."""
        self._settle_before_unmapping(slab)
        self.slabs.pop(slab, None)
        self.memo.clear()

    def page(self, entry: int) -> mx.array:
        """A view of one page, uint16 [page_units, unit_words]; it costs nothing.

        A later write may show in it, or may have to copy the whole slab because of it: never
        keep it.
        """
        self.settle()
        self._backend.settle(self)
        return self.view(entry)

    def defer(self, keys: mx.array, values: mx.array, rows: AttentionMetadata) -> None:
        """Write a step when attention reads these rows, or when anything else is asked of the
        pages. It is written at once where a read that is not computed yet would make a later write
        copy the slab, and where several threads use the pages: what one of them leaves to be
        computed later no other can compute.

        Raises:
            ThreadConflict: see `write`.
        """
        if self._deferred is not None:
            self.settle()
        if self._thread != get_ident():
            self._is_shared |= self._thread is not None
            self._thread = get_ident()
        if self._is_shared or not self._backend.writes_in_place:
            self.write(keys, values, rows)
            return
        deferred = _DeferredWrite((keys, values), rows)
        # Not later: what is read until then of the same rows has the step as its tail.
        if self.lazy_reads.noted:
            self._compute_lazy_reads(deferred)
        self._backend.begin(keys, values)
        self._deferred = deferred

    def settle(self) -> None:
        """Write the step that the pages are owed.

        Raises:
            ThreadConflict: another thread has not computed it yet.
        """
        deferred = self._deferred
        if deferred is not None:
            if self._thread != get_ident():
                _require_computed(deferred.step)
            self._backend.write(self, *deferred.step, deferred.rows)
            self._deferred = None

    def write(self, keys: mx.array, values: mx.array, rows: AttentionMetadata) -> None:
        """See `Backend.write`."""
        self.settle()
        if self.lazy_reads.noted:
            self._compute_lazy_reads(_DeferredWrite((keys, values), rows))
        self._backend.write(self, keys, values, rows)

    def load(self, contents: Mapping[int, mx.array]) -> None:
        """See `Backend.load`."""
        self._before_change(lambda: set(contents))
        self._backend.load(self, contents)

    def copy(self, copies: Mapping[int, int]) -> None:
        """See `Backend.copy`."""
        self._before_change(lambda: set(copies.values()))
        self._backend.copy(self, copies)

    def convert(self, copies: Mapping[int, int]) -> None:
        """See `Backend.convert`."""
        self._before_change(lambda: set(copies.values()))
        self._backend.convert(self, copies)

    def gather(
        self, rows: AttentionMetadata, tail: Tail | None = None
    ) -> tuple[mx.array, mx.array]:
        """See `Backend.gather`."""
        deferred = self._deferred
        if deferred is not None and deferred.rows is rows and self._holds_floats:
            tail = deferred.step
        else:
            self.settle()
        return self._backend.gather(self, rows, tail)

    def attend(
        self,
        queries: mx.array,
        rows: AttentionMetadata,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        sinks: mx.array | None = None,
        tail: Tail | None = None,
    ) -> mx.array:
        """See `Backend.attend`, and `Backend.write_and_attend` where the step is not written."""
        deferred = self._deferred
        if deferred is None or deferred.rows is not rows:
            self.settle()
            return self._backend.attend(
                self,
                queries,
                rows,
                scale=scale,
                causal=causal,
                window=window,
                sinks=sinks,
                tail=tail,
            )
        output = self._backend.write_and_attend(
            self,
            deferred.step,
            queries,
            rows,
            scale=scale,
            causal=causal,
            window=window,
            sinks=sinks,
        )
        self._deferred = None
        return output

    @property
    def _holds_floats(self) -> bool:
        """Whether a step is the same before and after it is written."""
        formats = {slab.layout.page_format for slab in self.slabs.values()}
        numbers = {number for each in formats for number in (each.keys, each.values)}
        return not any(isinstance(each, Quantised) for each in numbers)

    def _before_change(self, entries: Callable[[], set[int]]) -> None:
        """Let lazy reads see the pages of these entries as they are, and the step in its page."""
        self.settle()
        self.lazy_reads.compute(entries if self._backend.writes_in_place else set)

    def _compute_lazy_reads(self, deferred: _DeferredWrite) -> None:
        count, in_place = deferred.step[0].shape[2], self._backend.writes_in_place
        self.lazy_reads.compute(lambda: deferred.rows.last_entries(count) if in_place else set())

    def _settle_before_unmapping(self, slab: int) -> None:
        """Write what is owed to a slab that holds no block in use any more. It cannot fail: what
        another thread has not computed is of no use without its page."""
        deferred = self._deferred
        if deferred is None:
            return
        entries = deferred.rows.last_entries(deferred.step[0].shape[2])
        if slab in {entry // self.slab_stride for entry in entries}:
            try:
                self.settle()
            except ThreadConflict:
                self._deferred = None


def _require_computed(step: Tail) -> None:
    try:
        mx.eval(step)
    except RuntimeError as error:
        raise ThreadConflict from error
