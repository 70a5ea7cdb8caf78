"""Holds the memory of one layer, its slabs, and tracks lazy arrays that read it.

A gathered array reads the pages when MLX computes it. If a page was written in place by then, the
array would show the new contents. So `LazyReads` computes these arrays before a page changes, both
those that a caller holds and those that only a graph may hold.

Each thread computes its own arrays. Another thread's array must be computed already if it reads a
page that is about to change: see `ThreadConflict`.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread, current_thread
from typing import Any, NamedTuple

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.errors import QuantisedPage, ThreadConflict
from paged_kv.kernels.pages.page_format import FP16, LayerGeometry, PageFormat, PageLayout, Plane

# Slabs that a kernel takes, each as an argument of its own. Metal allows 31 arguments in all.
MAX_SLABS = 16
# The key of a batch's `memo` once its pages are known to take a step.
WRITABLE = "writable"


@dataclass(eq=False)
class Slab:
    """Adjacent pages of one format, which never changes.

    Attributes:
        memory: uint16 [pages * page_units, unit_words].
        layout: the layout of each page.
    """

    memory: mx.array
    layout: PageLayout

    def view(self, plane: Plane, first: int) -> mx.array:
        """A view of a plane of all pages, uint16 [pages, heads, slots, slot_words].

        Args:
            first: the first word of the plane within a page.
        """
        layout, slots = self.layout, (plane.heads, plane.slots, plane.slot_words)
        strides = layout.page_words, plane.head_words, plane.slot_words, 1
        pages = self.memory.shape[0] // layout.page_units
        return mx.as_strided(self.memory, (pages, *slots), strides, first)

    @property
    def planes(self) -> list[mx.array]:
        """Views of the planes of keys and values."""
        return list(map(self.view, self.layout.planes, self.layout.offsets))


class LayerMemory:
    """The slabs of one layer. A slab is one allocation, and the pool grows by adding slabs.

    Args:
        geometry: the shape of the layer's keys and values.
        slab_stride: a table entry is slab * slab_stride + page.

    Attributes:
        slabs: the slabs by number.
        memo: data that the backend derives from the slabs; cleared when they change.
        kept: data that the backend keeps as long as the layer.
    """

    def __init__(self, geometry: LayerGeometry, slab_stride: int) -> None:
        self.geometry = geometry
        self.slab_stride = slab_stride
        self.slabs: dict[int, Slab] = {}
        self.memo: dict[Any, Any] = {}
        self.kept: Any = None

    def page_bytes(self, page_format: PageFormat) -> int:
        """Bytes of a page of that format.

        Raises:
            ValueError: the format cannot hold the layer's keys and values.
        """
        return PageLayout(page_format, self.geometry).page_bytes

    def layout_of(self, entry: int) -> PageLayout:
        return self.slabs[entry // self.slab_stride].layout

    def require_writable(self, metadata: AttentionMetadata, count: int) -> None:
        """Check, once for all layers of a step of `count` tokens, that its pages have 16 bits.

        Raises:
            QuantisedPage: one of them is quantised.
        """
        if WRITABLE not in metadata.memo:
            for entry in metadata.last_entries(count):
                if self.layout_of(entry).page_format != FP16:
                    raise QuantisedPage
            metadata.memo[WRITABLE] = True

    def view(self, entry: int) -> mx.array:
        """A view of one page in memory, uint16 [page_units, unit_words]."""
        slab, page = divmod(entry, self.slab_stride)
        units = self.slabs[slab].layout.page_units
        return self.slabs[slab].memory[page * units : (page + 1) * units]


class _Read(NamedTuple):
    """Arrays that a thread gathered: held by its caller, or possibly by a graph."""

    thread: Thread
    metadata: AttentionMetadata
    held: tuple["weakref.ref[mx.array]", ...] = ()
    in_graph: tuple[mx.array, ...] = ()

    def waiting(self) -> list[mx.array]:
        held = [reference() for reference in self.held]
        return [*self.in_graph, *[array for array in held if array is not None]]


class LazyReads:
    """The gathered arrays of one layer. All methods may be called from any thread.

    Attributes:
        noted: reads that may not be computed yet.
    """

    def __init__(self) -> None:
        self.noted: list[_Read] = []

    def watch(self, arrays: Iterable[mx.array], metadata: AttentionMetadata) -> None:
        """Note arrays gathered for `metadata` that the caller holds."""
        self.noted.append(_Read(current_thread(), metadata, held=tuple(map(weakref.ref, arrays))))

    def leave(
        self, arrays: tuple[mx.array, ...], metadata: AttentionMetadata, thread: Thread
    ) -> None:
        """Note arrays gathered for `metadata` by `thread` that only a graph may still hold.

        The garbage collector may call this at any time, so it only appends.
        """
        self.noted.append(_Read(thread, metadata, in_graph=arrays))

    def waiting(self) -> list[mx.array]:
        """This thread's arrays that may not be computed yet."""
        me = current_thread()
        return [array for read in self.noted if read.thread is me for array in read.waiting()]

    def compute_reads_of(self, is_read: Callable[[int], bool]) -> None:
        """Compute and forget this thread's arrays that read such table entries, before these lose
        their memory: until then the arrays would hold it. Arrays that cannot be computed, because
        they are part of a function that MLX traces, stay noted."""
        me = current_thread()
        for read in list(self.noted):
            tables = read.metadata.block_tables
            if read.thread is me and any(is_read(entry) for table in tables for entry in table):
                with suppress(RuntimeError, ValueError):
                    mx.eval(read.waiting())
                    self.noted.remove(read)

    def compute(self, changing: Callable[[], set[int]]) -> None:
        """Compute and forget this thread's arrays, before a write to the table entries that
        `changing` returns.

        Raises:
            ThreadConflict: another thread's array reads such an entry and is not computed yet.
        """
        # Reads that the garbage collector appends meanwhile stay noted.
        reads, self.noted = self.noted, []
        if not reads:
            return
        me = current_thread()
        try:
            mx.eval([array for read in reads if read.thread is me for array in read.waiting()])
        except BaseException:
            self.noted[:0] = reads
            raise
        # A thread that has ended will compute nothing.
        others = [read for read in reads if read.thread is not me and read.thread.is_alive()]
        others = [read for read in others if read.waiting()]
        if others:
            self.noted[:0] = others
            entries = changing()
            for read in others:
                if any(not entries.isdisjoint(table) for table in read.metadata.block_tables):
                    require_computed(*read.waiting())


def require_computed(*arrays: mx.array) -> None:
    """Raise ThreadConflict unless arrays of another thread are computed."""
    try:
        mx.eval(*arrays)
    except RuntimeError as error:
        raise ThreadConflict from error
