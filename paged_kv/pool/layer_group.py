"""Manages the layers that share block tables: those without a window, or those with the same one.
A group has one allocator, and pages for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from itertools import takewhile

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.events import NO_EVENTS, Events
from paged_kv.allocator.requantisation import RequantisationPolicy, full_blocks
from paged_kv.allocator.slabs import MAX_SLAB_PAGES, slab_of
from paged_kv.kernels.backends import backend_for
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_pages import MAX_SLAB_BYTES, LayerPages
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageFormat, page_format_named
from paged_kv.pool.stats import GroupStats
from paged_kv.pool.window import Window


class LayerGroup:
    """Layers that share block tables. Block i owns page i of every layer of the group.

    A layer's shapes are known from its first write, never from the model's configuration. Until
    every layer has written once, the group assumes that the others are as large as the first.
    Otherwise it would plan the first slab as if the model had one layer.
    """

    def __init__(
        self,
        layers: list[int],
        window: Window | None,
        page_format: PageFormat,
        backend: Backend,
        budget: ByteBudget,
        smaller_formats: tuple[PageFormat, ...] = (),
        events: Events = NO_EVENTS,
    ) -> None:
        self.layers = layers
        self.window = window
        self.page_format = page_format
        self.formats = {each.name: each for each in (page_format, *smaller_formats)}
        self.pages: dict[int, LayerPages] = {}
        self.gather_fallbacks = 0
        # How often pages moved, which invalidates earlier copies of block tables.
        self.moves = 0
        self._backend = backend
        self._budget = budget
        self._events = events
        self._allocator: BlockAllocator | None = None
        self._all_layers_known = False

    @property
    def is_open(self) -> bool:
        """Whether any layer has been written."""
        return self._allocator is not None

    @property
    def is_settled(self) -> bool:
        """Whether the shapes of all layers that write are known."""
        return self._all_layers_known

    @property
    def allocator(self) -> BlockAllocator:
        """The group's allocator, made at the first write; assert `is_open` first."""
        assert self._allocator is not None, "no layer of this group was written yet"
        return self._allocator

    def new_table(self, page_format: PageFormat) -> BlockTable:
        """Make a block table for a sequence, with a ring if the group has a window."""
        self.add_format(page_format)
        ring = self.window.ring if self.window else None
        return self.allocator.new_table(ring, page_format.name)

    def rehearsing(self, allocator: BlockAllocator) -> LayerGroup:
        """A copy of the group with another allocator and without pages, for a rehearsal."""
        group = copy(self)
        group._allocator, group.pages = allocator, {}
        return group

    def add_format(self, page_format: PageFormat) -> None:
        """Add a page format.

        Raises:
            ValueError: it cannot hold the keys and values of a layer; nothing was changed.
        """
        if page_format.name in self.formats or not self.is_open:
            return
        for layer, pages in self.pages.items():
            self._require_holds(page_format, layer, pages)
        slabs = self.allocator.add_format(
            page_format.name, self._block_bytes(self.pages, page_format)
        )
        slabs.max_slab_pages = self._max_slab_pages(page_format)
        self.formats[page_format.name] = page_format

    def open_layer(self, layer: int, geometry: LayerGeometry) -> LayerPages:
        """The pages of a layer, made at its first write. Layers with equal geometry share one
        `LayerGeometry` object.

        Raises:
            ValueError: the layer has another geometry, or a format cannot hold this one.
            PoolExhausted: the mapped slabs would exceed the budget with this layer.
        """
        pages = self.pages.get(layer)
        if pages is None:
            known = [each.geometry for each in self.pages.values()]
            geometry = next((each for each in known if each == geometry), geometry)
            backend = backend_for(self._backend, geometry)
            pages = LayerPages(geometry, backend, MAX_SLAB_PAGES)
            for page_format in self.formats.values():
                self._require_holds(page_format, layer, pages)
            self._add_layer(layer, pages)
        elif pages.geometry != geometry:
            raise ValueError(f"layer {layer} expects {pages.geometry}, got {geometry}")
        return pages

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the group's own format."""
        return self.allocator.format_named(self.page_format.name).block_bytes

    def blocks_for(self, tokens: int) -> int:
        """The most blocks that a sequence of `tokens` tokens holds."""
        blocks = -(-tokens // PAGE_SIZE)
        return blocks if self.window is None else min(blocks, self.window.ring.size)

    def settle(self) -> None:
        """Note that a second step begins: layers that wrote nothing in the first never write."""
        if self.is_open and not self._all_layers_known:
            self._all_layers_known = True
            self.allocator.set_block_bytes(self._all_block_bytes(self.pages))

    def copy_pages(self, copies: Mapping[int, int]) -> None:
        """Copy whole blocks (from, to) in every layer."""
        if copies:
            for pages in self.pages.values():
                pages.copy(copies)

    def convert(
        self,
        tables: list[BlockTable],
        page_format: PageFormat,
        make_room: Callable[[int], None],
    ) -> None:
        """Convert the blocks of some tables to that format, slab by slab: each emptied slab is
        unmapped before the next one is read. Blocks that the tables share stay shared.

        `make_room(n)` reclaims memory for n blocks of the format.

        Raises:
            PoolExhausted: the budget does not hold the next slab's blocks in both formats. Earlier
                slabs stay converted, and another call resumes.
        """
        while sources := self._in_last_slab(tables, page_format):
            make_room(len(sources))
            # Reclaiming memory may have moved some.
            sources = self._in_last_slab(tables, page_format)[: len(sources)]
            targets = self.allocator.allocate(len(sources), page_format.name)
            copies = dict(zip(sources, targets, strict=True))
            try:
                self._convert_pages(copies)
                for table in tables:
                    table.exchange(copies)
            finally:
                self.allocator.release(targets)
            self.allocator.unmap_empty_slabs()

    def requantise(self, policy: RequantisationPolicy, pressure: float) -> dict[str, int]:
        """Requantise the policy's next pages, as many as one slab holds, then compact and unmap
        slabs. Returns the number of requantised pages by their new format.

        Does nothing if no page can be requantised, or no slab for the new pages fits the budget.
        """
        allocator = self.allocator
        plan = [
            each
            for each in policy.requantisations(full_blocks(allocator), pressure)
            if allocator.format_of(each.block).name != each.page_format
        ]
        if not plan:
            return {}
        alike = takewhile(lambda each: each.page_format == plan[0].page_format, plan)
        name, reclaimer = self._first_that_fits(policy, plan[0].page_format)
        sources = [each.block for each in alike][:reclaimer]
        if not sources:
            return {}
        allocator.ensure_free({name: len(sources)})
        moves = dict(zip(sources, allocator.format_named(name).free, strict=False))
        self._convert_pages(moves)
        allocator.apply_moves(moves)
        self.compact()
        return {name: len(moves)}

    def stats(self) -> GroupStats:
        """A snapshot, which keeps the blocks of collected sequences. O(slabs)."""
        return GroupStats(
            **vars(self.allocator.snapshot()),
            layers=len(self.layers),
            window=self.window.size if self.window else None,
            gather_fallbacks=self.gather_fallbacks,
            plain_layers=sum(
                pages.backend_name != self._backend.name for pages in self.pages.values()
            ),
        )

    def compact(self) -> int:
        """Move pages out of the emptiest slabs and unmap those; returns the number of moves."""
        if not self.is_open:
            return 0
        moves = self.allocator.compaction_plan()
        if moves:
            self.copy_pages(moves)
            self.moves += 1
            self.allocator.apply_moves(moves)
        self.allocator.unmap_empty_slabs()
        return len(moves)

    def _first_that_fits(self, policy: RequantisationPolicy, page_format: str) -> tuple[str, int]:
        """The first of the policy's formats, from `page_format` on, of which the budget still holds
        a slab, and the number of pages that fit; 0 if none does."""
        formats = policy.page_formats
        for name in formats[formats.index(page_format) :]:
            if reclaimer := self.allocator.room_in_one_slab(name):
                return name, reclaimer
        return page_format, 0

    def _convert_pages(self, copies: Mapping[int, int]) -> None:
        """Copy whole blocks (from, to) into another format in every layer."""
        for pages in self.pages.values():
            pages.convert(copies)
        self.moves += 1

    def _in_last_slab(self, tables: list[BlockTable], page_format: PageFormat) -> list[int]:
        """The tables' blocks of other formats in the last slab that has such blocks."""
        format_of = self.allocator.format_of
        blocks = {block for table in tables for block in table.blocks}
        others = [block for block in blocks if format_of(block).name != page_format.name]
        if not others:
            return []
        last = slab_of(max(others))
        return sorted(block for block in others if slab_of(block) == last)

    def _add_layer(self, layer: int, pages: LayerPages) -> None:
        block_bytes = self._all_block_bytes({**self.pages, layer: pages})
        if self._allocator is None:
            first = self.page_format.name
            self._allocator = BlockAllocator(
                self._budget,
                block_bytes[first],
                PAGE_SIZE,
                self._map_slab,
                self._unmap_slab,
                first,
                self._events,
            )
            for name, size in block_bytes.items():
                self._allocator.add_format(name, size)
        else:
            self._allocator.set_block_bytes(block_bytes)
        for slabs in self._allocator.formats:
            for slab, count in slabs.slabs.items():
                pages.map_slab(slab, count, self.formats[slabs.name])
        self.pages[layer] = pages
        for slabs in self._allocator.formats:
            slabs.max_slab_pages = self._max_slab_pages(self.formats[slabs.name])

    def _require_holds(self, page_format: PageFormat, layer: int, pages: LayerPages) -> None:
        try:
            page_format.planes(pages.geometry)
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from None

    def _max_slab_pages(self, page_format: PageFormat) -> int:
        largest = max(pages.page_bytes(page_format) for pages in self.pages.values())
        return max(1, min(MAX_SLAB_PAGES, MAX_SLAB_BYTES // largest))

    def _all_block_bytes(self, pages: Mapping[int, LayerPages]) -> dict[str, int]:
        """Bytes of a block of each format."""
        return {name: self._block_bytes(pages, each) for name, each in self.formats.items()}

    def _block_bytes(self, pages: Mapping[int, LayerPages], page_format: PageFormat) -> int:
        sizes = [layer_pages.page_bytes(page_format) for layer_pages in pages.values()]
        unknown = 0 if self._all_layers_known else len(self.layers) - len(sizes)
        return sum(sizes) + unknown * sizes[0]

    def _map_slab(self, slab: int, count: int, page_format: str) -> None:
        try:
            for pages in self.pages.values():
                pages.map_slab(slab, count, self.formats[page_format])
        except BaseException:
            self._unmap_slab(slab)
            raise

    def _unmap_slab(self, slab: int) -> None:
        for pages in self.pages.values():
            pages.unmap_slab(slab)


def new_groups(
    num_layers: int,
    windows: Mapping[int, Window],
    page_format: PageFormat,
    policy: RequantisationPolicy | None,
    backend: Backend,
    budget: ByteBudget,
    events: Events,
) -> list[LayerGroup]:
    """Make a group of the layers without a window, and one for each window. Only the former is
    requantised."""
    layers: dict[Window | None, list[int]] = {}
    for layer in range(num_layers):
        layers.setdefault(windows.get(layer), []).append(layer)
    smaller = tuple(map(page_format_named, policy.page_formats)) if policy else ()
    return [
        LayerGroup(members, window, page_format, backend, budget, () if window else smaller, events)
        for window, members in layers.items()
    ]
