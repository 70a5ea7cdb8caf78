"""The pages of one layer: its slabs, and the operations on them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from paged_kv.kernels.backend import Backend
from paged_kv.kernels.layer_geometry import LayerGeometry
from paged_kv.kernels.lazy_reads import LazyReads
from paged_kv.kernels.page_format import PageFormat, PageLayout
from paged_kv.kernels.page_rows import PageRows, Tail

# MLX counts the elements of a dimension in 32 bits, and devices limit the size of a buffer.
MAX_SLAB_BYTES = 1 << 31


@dataclass(eq=False)
class Slab:
    """Pages of one format side by side, for life.

    Attributes:
        memory: uint16 [pages * page_units, unit_words].
        layout: what the pages are.
    """

    memory: mx.array
    layout: PageLayout


class LayerPages:
    """Owns the slabs of one layer. A slab is one allocation, and growing adds one.

    Args:
        geometry: what the layer writes.
        backend: who writes and reads its pages.
        slab_stride: a table entry is slab * slab_stride + page.

    Attributes:
        lazy_reads: what was read from the pages and may not be computed yet. It is computed
            before a page changes.
        memo: what the backend has made of the slabs, until they change.
        moves: how often pages were moved, so that earlier block tables mean nothing any more.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        backend: Backend,
        slab_stride: int,
    ) -> None:
        self.geometry = geometry
        self.slab_stride = slab_stride
        self.slabs: dict[int, Slab] = {}
        self.lazy_reads = LazyReads()
        self.memo: dict[str, Any] = {}
        self.moves = 0
        self._backend = backend

    @property
    def backend_name(self) -> str:
        return self._backend.name

    def page_bytes(self, page_format: PageFormat) -> int:
        """Bytes of a page of that format.

        Raises:
            ValueError: the format cannot hold what the layer writes.
        """
        return PageLayout(page_format, self.geometry).page_bytes

    def layout_of(self, entry: int) -> PageLayout:
        """What a page is."""
        return self.slabs[entry // self.slab_stride].layout

    def map_slab(self, slab: int, pages: int, page_format: PageFormat) -> None:
        """Add a slab of `pages` pages; their contents are not defined."""
        layout = PageLayout(page_format, self.geometry)
        memory = self._backend.new_slab(pages, layout.page_units, layout.unit_words)
        self.slabs[slab] = Slab(memory, layout)
        self.memo.clear()

    def unmap_slab(self, slab: int) -> None:
        """Give a slab's memory back; one that was not mapped is ignored."""
        self._backend.flush(self)
        self.slabs.pop(slab, None)
        self.memo.clear()

    def page(self, entry: int) -> mx.array:
        """A view of one page, uint16 [page_units, unit_words]; it costs nothing.

        A later write may show in it, or may have to copy the whole slab because of it: never
        keep it.
        """
        self._backend.settle(self)
        slab, page = divmod(entry, self.slab_stride)
        units = self.slabs[slab].layout.page_units
        return self.slabs[slab].memory[page * units : (page + 1) * units]

    def write(self, keys: mx.array, values: mx.array, rows: PageRows) -> None:
        """See `Backend.write`."""
        self._before_change(lambda: rows.last_entries(keys.shape[2]))
        self._backend.write(self, keys, values, rows)

    def load(self, contents: Mapping[int, mx.array]) -> None:
        """See `Backend.load`."""
        self._before_change(lambda: set(contents))
        self._backend.load(self, contents)

    def copy(self, copies: Mapping[int, int]) -> None:
        """See `Backend.copy`."""
        self._before_change(lambda: set(copies.values()))
        self._backend.copy(self, copies)

    def note_moves(self) -> None:
        """Note that pages were moved, and block tables of before mean nothing any more."""
        self.moves += 1

    def convert(self, copies: Mapping[int, int]) -> None:
        """See `Backend.convert`."""
        self._before_change(lambda: set(copies.values()))
        self._backend.convert(self, copies)

    def _before_change(self, entries: Callable[[], set[int]]) -> None:
        """Let lazy reads see the pages of these entries as they are."""
        self.lazy_reads.compute(entries if self._backend.writes_in_place else set)

    def gather(self, rows: PageRows, tail: Tail | None = None) -> tuple[mx.array, mx.array]:
        """See `Backend.gather`."""
        return self._backend.gather(self, rows, tail)

    def attend(
        self,
        queries: mx.array,
        rows: PageRows,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        sinks: mx.array | None = None,
        tail: Tail | None = None,
    ) -> mx.array:
        """See `Backend.attend`."""
        return self._backend.attend(
            self, queries, rows, scale=scale, causal=causal, window=window, sinks=sinks, tail=tail
        )
