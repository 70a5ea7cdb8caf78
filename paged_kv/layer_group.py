"""The layers that share one block table: all without a window, or all with the same one. One
allocator, and the pages of each layer."""

from collections.abc import Mapping

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.slabs import MAX_SLAB_PAGES
from paged_kv.kernels.backend import Backend, backend_for
from paged_kv.kernels.layer_geometry import LayerGeometry
from paged_kv.kernels.layer_pages import MAX_SLAB_BYTES, LayerPages
from paged_kv.kernels.page_format import PAGE_SIZE, PageFormat
from paged_kv.kernels.page_rows import PageRows
from paged_kv.window import Window


class LayerGroup:
    """Block i owns page i of every layer of the group.

    What a layer writes is known from its first write on, and never from the model's
    configuration. Until all layers have written once, those that have not are taken to be as
    large as the first one: else the first slab would be planned as if the model had one layer.
    """

    def __init__(
        self,
        layers: list[int],
        window: Window | None,
        page_format: PageFormat,
        backend: Backend,
        budget: ByteBudget,
    ) -> None:
        self.layers = layers
        self.window = window
        self.page_format = page_format
        self.pages: dict[int, LayerPages] = {}
        # The layers of a step read the same rows one after the other. What backends make of
        # them, such as arrays of the tables, is then made once.
        self.latest_rows = PageRows((), (), ())
        self._backend = backend
        self._budget = budget
        self._allocator: BlockAllocator | None = None
        self._all_layers_known = False

    @property
    def is_open(self) -> bool:
        """Whether any layer has been written."""
        return self._allocator is not None

    @property
    def allocator(self) -> BlockAllocator:
        """The group's allocator; there is one from the first write on."""
        assert self._allocator is not None, "no layer of this group was written yet"
        return self._allocator

    def new_table(self) -> BlockTable:
        """A block table for a sequence, a ring if the group has a window."""
        return self.allocator.new_table(self.window.ring if self.window else None)

    def open_layer(self, layer: int, geometry: LayerGeometry) -> LayerPages:
        """The pages of a layer, made at its first write.

        Raises:
            ValueError: the layer wrote something else before, or the format cannot hold it.
            PoolExhausted: what is mapped does not fit once this layer is counted.
        """
        pages = self.pages.get(layer)
        if pages is None:
            backend = backend_for(self._backend, geometry, self.page_format)
            pages = LayerPages(geometry, self.page_format, backend, MAX_SLAB_PAGES)
            self._add_layer(layer, pages)
        elif pages.geometry != geometry:
            raise ValueError(f"layer {layer} expects {pages.geometry}, got {geometry}")
        return pages

    def settle(self) -> None:
        """Note that a second step begins: a layer that wrote nothing in the first never will."""
        if not self._all_layers_known:
            self._all_layers_known = True
            self.allocator.set_block_bytes(self._block_bytes(self.pages))

    def copy_pages(self, copies: Mapping[int, int]) -> None:
        """Copy whole blocks (from, to) in every layer."""
        if copies:
            for pages in self.pages.values():
                pages.copy(copies)

    def compact(self) -> int:
        """Move pages out of the emptiest slabs and give those back; returns the moves."""
        if not self.is_open:
            return 0
        moves = self.allocator.compaction_plan()
        self.copy_pages(moves)
        self.allocator.apply_moves(moves)
        self.allocator.unmap_empty_slabs()
        return len(moves)

    def _add_layer(self, layer: int, pages: LayerPages) -> None:
        block_bytes = self._block_bytes({**self.pages, layer: pages})
        if self._allocator is None:
            self._allocator = BlockAllocator(
                self._budget, block_bytes, PAGE_SIZE, self._map_slab, self._unmap_slab
            )
        else:
            self._allocator.set_block_bytes(block_bytes)
        limit = max(1, MAX_SLAB_BYTES // pages.page_bytes)
        self._allocator.max_slab_pages = min(limit, self._allocator.max_slab_pages)
        for slab, count in self._allocator.slabs.items():
            pages.map_slab(slab, count)
        self.pages[layer] = pages

    def _block_bytes(self, pages: Mapping[int, LayerPages]) -> int:
        sizes = [layer_pages.page_bytes for layer_pages in pages.values()]
        unknown = 0 if self._all_layers_known else len(self.layers) - len(sizes)
        return sum(sizes) + unknown * sizes[0]

    def _map_slab(self, slab: int, count: int) -> None:
        try:
            for pages in self.pages.values():
                pages.map_slab(slab, count)
        except BaseException:
            self._unmap_slab(slab)
            raise

    def _unmap_slab(self, slab: int) -> None:
        for pages in self.pages.values():
            pages.unmap_slab(slab)
