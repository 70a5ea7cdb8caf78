"""The memory of one layer: its slabs."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.page_format import PageFormat, PageLayout


@dataclass(eq=False)
class Slab:
    """Pages of one format side by side, for life.

    Attributes:
        memory: uint16 [pages * page_units, unit_words].
        layout: what the pages are.
    """

    memory: mx.array
    layout: PageLayout


class LayerMemory:
    """The slabs of one layer. A slab is one allocation, and growing adds one.

    Args:
        geometry: what the layer writes.
        slab_stride: a table entry is slab * slab_stride + page.

    Attributes:
        slabs: by their numbers.
        memo: what the backend has made of the slabs, until they change.
        kept: what the backend keeps of the layer for life.
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
            ValueError: the format cannot hold what the layer writes.
        """
        return PageLayout(page_format, self.geometry).page_bytes

    def layout_of(self, entry: int) -> PageLayout:
        """What a page is."""
        return self.slabs[entry // self.slab_stride].layout

    def view(self, entry: int) -> mx.array:
        """One page as it is in memory, uint16 [page_units, unit_words]."""
        slab, page = divmod(entry, self.slab_stride)
        units = self.slabs[slab].layout.page_units
        return self.slabs[slab].memory[page * units : (page + 1) * units]
