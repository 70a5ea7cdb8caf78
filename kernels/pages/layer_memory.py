"""Holds the memory of one layer: its slabs."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.errors import QuantisedPage
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
        """The layout of a page."""
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
