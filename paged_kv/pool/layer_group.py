"""Manages the layers that share block tables: those without a window, or those with the same one.
A group has one allocator, and pages for each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, takewhile

from paged_kv.admission.pool_size import GroupSize
from paged_kv.allocator.allocator_stats import counted
from paged_kv.allocator.block_allocator import BlockAllocator, BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.requantisation import Requantisation, RequantisationPolicy, full_blocks
from paged_kv.allocator.slabs import MAX_SLAB_PAGES, Rewrite, slab_of
from paged_kv.kernels.backends import backend_for
from paged_kv.kernels.pages.attention_metadata import BlockTables
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.errors import ThreadConflict
from paged_kv.kernels.pages.layer_memory import MAX_SLABS
from paged_kv.kernels.pages.layer_pages import MAX_SLAB_BYTES, LayerPages, NewSlab
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, LayerGeometry, PageFormat
from paged_kv.offload.offloaded_layer import OffloadedLayer
from paged_kv.offload.offloading import OFFLOADED, Offloading
from paged_kv.pool.layer_kinds import Window
from paged_kv.pool.stats import GroupStats

# The most blocks of a sequence that have 16 bits at a time: the page that is being written, and the
# one that the latest step wrote before it.
WRITTEN_BLOCKS = 2
# The share of a group's pages that get smaller at a time, so that not many more do than must.
REQUANTISED_SHARE = 16

Needs = Mapping["LayerGroup", Mapping[str, int]]
"""Blocks that are needed in each group, by page format."""

MakeRoom = Callable[[Callable[[], Needs]], None]
"""See `Reclaimer.make_room`."""


@dataclass(eq=False, repr=False)
class LayerGroup:
    """Layers that share block tables. Block i owns page i of every layer of the group.

    A page that is written has 16 bits. Full pages are recoded to the format of their sequence, the
    first one to `PageFormat.first` of it, but not those of rings, which are written again.

    A layer's shapes are known from its first write, never from the model's configuration. Until
    every layer has written once, the group assumes that the others are as large as the first.
    Otherwise it would plan the first slab as if the model had one layer.
    """

    layers: list[int]
    window: Window | None  # that they share
    backend: Backend
    budget: ByteBudget
    # Pages of rings keep 16 bits and stay in memory, so the next four are for other groups.
    page_format: PageFormat = FP16  # of full pages, but for sequences with one of their own
    smaller_formats: tuple[PageFormat, ...] = ()  # those that full pages may get later
    read_tokens: int | None = None  # see `PoolOptions`
    offloading: Offloading | None = None  # takes pages out of memory; None if they stay there
    formats: dict[str, PageFormat] = field(init=False)  # of all the group's pages, by name
    pages: dict[int, LayerPages] = field(default_factory=dict, init=False)  # of layers with a write
    # How often keys and values were gathered for an attention of the model's.
    gather_fallbacks: int = field(default=0, init=False)
    # How often pages moved, which invalidates earlier copies of block tables.
    moves: int = field(default=0, init=False)
    # The block tables of the latest step, most of which the next one has too.
    latest_tables: BlockTables = field(default_factory=BlockTables, init=False)
    is_open: bool = field(default=False, init=False)  # whether any layer has been written
    # Whether the shapes of all layers that write are known.
    knows_all_layers: bool = field(default=False, init=False)
    allocator: BlockAllocator = field(init=False)  # there is none before the group is open

    def __post_init__(self) -> None:
        formats = (FP16, self.page_format, self.page_format.first, *self.smaller_formats)
        self.formats = {each.name: each for each in formats}

    def new_table(self, page_format: PageFormat) -> BlockTable:
        """Make a block table for a sequence whose full pages get that format, or one with a ring if
        the group has a window."""
        if self.window:
            return self.allocator.new_table(self.window.ring)
        self.add_formats(page_format, page_format.first)
        return self.allocator.new_table(None, page_format.name, page_format.first.name)

    def add_formats(self, *page_formats: PageFormat) -> None:
        """Add page formats; all or none.

        Raises:
            ValueError: one cannot hold the keys and values of a layer; nothing was changed.
        """
        new = dict.fromkeys(each for each in page_formats if each.name not in self.formats)
        if not new or not self.is_open:
            return
        for page_format in new:
            for layer, pages in self.pages.items():
                self._require_holds(page_format, layer, pages)
        for page_format in new:
            self.allocator.add_format(page_format.name, self._block_bytes(self.pages, page_format))
            self.formats[page_format.name] = page_format
        self._set_page_sizes()

    def open_layer(self, layer: int, geometry: LayerGeometry) -> LayerPages:
        """The pages of a layer, made at its first write. Layers with equal geometry share one
        `LayerGeometry` object.

        Raises:
            ValueError: the layer has another geometry, or a format cannot hold this one.
            PoolExhausted: the mapped slabs would exceed the budget with this layer.
        """
        # Attention to keys and values that differ in heads does not choose.
        chooses = self.read_tokens is not None and geometry.k_heads == geometry.v_heads
        geometry = replace(geometry, has_summaries=chooses)
        pages = self.pages.get(layer)
        if pages is None:
            known = [each.geometry for each in self.pages.values()]
            geometry = next((each for each in known if each == geometry), geometry)
            pages = self._new_pages(layer, geometry, self.read_tokens if chooses else None)
            for page_format in self.formats.values():
                self._require_holds(page_format, layer, pages)
            self._add_layer(layer, pages)
        elif pages.geometry != geometry:
            raise ValueError(
                f"layer {layer} expects {pages.geometry}, got {geometry}: pages stay as the model "
                "first wrote them, so after model.set_dtype make a new PagedCacheFactory(model)"
            )
        return pages

    def drain(self) -> None:
        """Release the blocks of collected sequences, and frames that no other needs."""
        self.allocator.drain()
        if self.offloading is None or not self.offloading.frames:
            return
        surplus = len(self.offloading.frames) - self.offloading.wanted_frames(self.allocator)
        if surplus > 0:
            for pages in self.pages.values():
                if isinstance(pages, OffloadedLayer):
                    pages.forget_fetches()
            self.offloading.drop_frames(self.allocator, surplus)

    def abandon(self) -> None:
        """Forget the pages, whose blocks nobody refers to any more."""
        if self.is_open:
            formats = self.allocator.formats
            self.budget.take(-sum(each.capacity * each.block_bytes for each in formats))
            self.pages.clear()
            self.is_open = False

    def content_format(self, block: int) -> str:
        """The format of a block's contents, wherever they are."""
        name = self.allocator.format_of(block).name
        return self.page_format.name if name == OFFLOADED.name else name

    @property
    def size(self) -> GroupSize:
        """The memory of a sequence in the group, which must be open. A ring's pages keep 16 bits,
        as pages do that are written."""

        def nbytes(page_format: PageFormat) -> int:
            return self.allocator.format_named(page_format.name).block_bytes

        return GroupSize(
            block_bytes=nbytes(self.page_format),
            ring=None if self.window is None else self.window.ring.size,
            written_bytes=nbytes(FP16),
            written_blocks=WRITTEN_BLOCKS if self.recodes else 0,
            first_bytes=nbytes(self.page_format.first),
            kept_blocks=None if self.offloading is None else self.offloading.kept_pages,
            left_bytes=0 if self.offloading is None else nbytes(OFFLOADED),
            page_size=PAGE_SIZE,
        )

    @property
    def recodes(self) -> bool:
        """Whether full blocks get another format than those that are written."""
        return self.page_format != FP16

    def needs_of(self, tokens: int) -> Counter[str]:
        """The most blocks that a sequence of `tokens` tokens holds at a time, by page format, all
        of them in memory."""
        held = self.size.blocks_for(tokens)
        needs = Counter({FP16.name: held.written})
        needs.update({self.page_format.first.name: held.first})
        needs.update({self.page_format.name: held.others + held.left})
        return +needs

    def record_second_step(self) -> None:
        """Record that a second step begins: layers that wrote nothing in the first never write."""
        if self.is_open and not self.knows_all_layers:
            self.knows_all_layers = True
            self.allocator.set_block_bytes(self._all_block_bytes(self.pages))

    def copy_pages(self, copies: Mapping[int, int]) -> None:
        """Copy whole blocks (from, to) in every layer, into the format of each `to`."""
        if copies:
            for pages in self.pages.values():
                pages.copy(copies)

    def convert(
        self,
        full_blocks: Callable[[], Mapping[BlockTable, Iterable[int]]],
        page_format: PageFormat,
        make_room: MakeRoom,
    ) -> None:
        """Convert the full blocks of some tables to that format, slab by slab: each emptied slab is
        unmapped before the next one is read. Blocks that the tables share stay shared, and other
        tables keep the blocks as they are.

        Raises:
            PoolExhausted: the budget does not hold the next slab's blocks in both formats. Earlier
                slabs stay converted, and another call resumes.
        """

        def sources() -> Iterable[int]:
            return chain.from_iterable(full_blocks().values())

        for blocks in self._slab_by_slab(sources, page_format, make_room):
            targets = self.allocator.allocate(len(blocks), page_format.name)
            copies = dict(zip(blocks, targets, strict=True))
            try:
                self.copy_pages(copies)
                self.moves += 1
                for table in full_blocks():
                    table.exchange(copies)
            finally:
                self.allocator.release(targets)
            self.allocator.unmap_empty_slabs()

    def recode(
        self, blocks: Callable[[], Iterable[int]], page_format: str, make_room: MakeRoom
    ) -> None:
        """Recode full blocks, slab by slab, for all tables and prefixes that hold them. `blocks()`
        gives those that are left.

        Raises:
            PoolExhausted: the budget does not hold the next slab's blocks in both formats. Earlier
                slabs stay recoded, and another call resumes.
        """
        for found in self._slab_by_slab(blocks, self.formats[page_format], make_room):
            self._recode(found, page_format)

    def requantise(self, policy: RequantisationPolicy, pressure: float) -> dict[str, int]:
        """Requantise the policy's next pages, a share of all, then give back what that frees.
        Returns the number of requantised pages by their new format.

        Does nothing if no page can be requantised, or the budget holds none of the new pages.
        """
        plan = self._next_requantisations(policy, pressure)
        if not plan:
            return {}
        # The first of its formats of which the budget still holds a page.
        names = policy.page_formats[policy.page_formats.index(plan[0].page_format) :]
        fitting = ((name, most) for name in names if (most := self.allocator.available(name)))
        name, most = next(fitting, (names[0], 0))
        few = max(1, self.allocator.num_used // REQUANTISED_SHARE)
        count = min(most, few, len(plan))
        if not count:
            return {}
        self.allocator.ensure_free({name: count}, 0)
        # Mapping a slab may have moved some.
        plan = self._next_requantisations(policy, pressure)
        self._recode([each.block for each in plan[:count]], name)
        self.allocator.compact()
        return {name: count}

    def stats(self) -> GroupStats:
        """A snapshot, which keeps the blocks of collected sequences. See `BlockAllocator.stats`."""
        return GroupStats(
            **counted(self.allocator.snapshot())
            | {
                "layers": len(self.layers),
                "window": self.window.size if self.window else None,
                "gather_fallbacks": self.gather_fallbacks,
                "plain_layers": sum(
                    pages.backend.name != self.backend.name for pages in self.pages.values()
                ),
            }
        )

    def _next_requantisations(
        self, policy: RequantisationPolicy, pressure: float
    ) -> list[Requantisation]:
        """The policy's next pages, as long as it names the same format."""
        format_of = self.allocator.format_of
        plan = [
            each
            for each in policy.requantisations(full_blocks(self.allocator), pressure)
            if format_of(each.block).name != each.page_format
        ]
        return list(takewhile(lambda each: each.page_format == plan[0].page_format, plan))

    def _recode(self, blocks: list[int], page_format: str) -> None:
        """Move these blocks into free ones of another format, for all that hold them."""
        moves = dict(zip(blocks, self.allocator.format_named(page_format).free, strict=False))
        self.copy_pages(moves)
        self.moves += 1
        self.allocator.apply_moves(moves)

    def _slab_by_slab(
        self,
        blocks: Callable[[], Iterable[int]],
        page_format: PageFormat,
        make_room: MakeRoom,
    ) -> Iterator[list[int]]:
        """Those of other formats, slab by slab, each time with room for as many of that format."""
        while found := self._in_last_slab(blocks(), page_format):
            needs = {self: {page_format.name: len(found)}}
            make_room(partial(dict, needs))
            # Reclaiming memory may have moved some.
            yield self._in_last_slab(blocks(), page_format)[: len(found)]

    def _in_last_slab(self, blocks: Iterable[int], page_format: PageFormat) -> list[int]:
        """Those of other formats in the last slab that has such blocks."""
        format_of = self.allocator.format_of
        others = {block for block in blocks if format_of(block).name != page_format.name}
        if not others:
            return []
        last = slab_of(max(others))
        return sorted(block for block in others if slab_of(block) == last)

    def _add_layer(self, layer: int, pages: LayerPages) -> None:
        block_bytes = self._all_block_bytes({**self.pages, layer: pages})
        if self.is_open:
            self.allocator.set_block_bytes(block_bytes)
        else:
            callbacks = self._map_slab, self._unmap_slab, self._rewrite_slabs
            size = block_bytes[FP16.name]
            self.allocator = BlockAllocator(
                self.budget, size, PAGE_SIZE, *callbacks, MAX_SLABS, FP16.name
            )
            for name, size in block_bytes.items():
                self.allocator.add_format(name, size)
        for slabs in self.allocator.formats:
            for slab, count in slabs.slabs.items():
                pages.map_slab(slab, count, self.formats[slabs.name])
        self.pages[layer] = pages
        self._set_page_sizes()
        self.is_open = True

    def _new_pages(
        self, layer: int, geometry: LayerGeometry, read_tokens: int | None
    ) -> LayerPages:
        backend = backend_for(self.backend, geometry)
        if self.offloading is None:
            return LayerPages(geometry, backend, MAX_SLAB_PAGES, read_tokens)
        if read_tokens is None:
            raise ValueError(
                f"layer {layer} has {geometry.k_heads} heads of keys and {geometry.v_heads} of "
                "values, and reads all tokens: its pages cannot be offloaded. Leave `offload` out"
            )
        return OffloadedLayer(geometry, backend, MAX_SLAB_PAGES, read_tokens, self.offloading)

    def _require_holds(self, page_format: PageFormat, layer: int, pages: LayerPages) -> None:
        try:
            page_format.planes(pages.geometry)
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from None

    def _set_page_sizes(self) -> None:
        for slabs in self.allocator.formats:
            page_format = self.formats[slabs.name]
            slabs.page_bytes = max(each.page_bytes(page_format) for each in self.pages.values())
            most = min(MAX_SLAB_PAGES, MAX_SLAB_BYTES // slabs.page_bytes)
            slabs.max_slab_pages = max(1, most)

    def _all_block_bytes(self, pages: Mapping[int, LayerPages]) -> dict[str, int]:
        """Bytes of a block of each format."""
        return {name: self._block_bytes(pages, each) for name, each in self.formats.items()}

    def _block_bytes(self, pages: Mapping[int, LayerPages], page_format: PageFormat) -> int:
        sizes = [layer_pages.page_bytes(page_format) for layer_pages in pages.values()]
        unknown = 0 if self.knows_all_layers else len(self.layers) - len(sizes)
        return sum(sizes) + unknown * sizes[0]

    def _map_slab(self, slab: int, count: int, page_format: str) -> None:
        try:
            for pages in self.pages.values():
                pages.map_slab(slab, count, self.formats[page_format])
        except BaseException:
            self._unmap_slab(slab)
            raise

    def _unmap_slab(self, slab: int) -> None:
        # In all layers, even if one of them fails to write its unwritten step.
        with ExitStack() as layers:
            for pages in self.pages.values():
                layers.callback(pages.unmap_slab, slab)

    def _rewrite_slabs(self, rewrite: Rewrite, slab: int, moves: Mapping[int, int]) -> bool:
        """See `RewriteSlabs`. Layer by layer, so that few pages exist twice at a time."""
        new = NewSlab(slab, rewrite.new_pages, self.formats[rewrite.slabs.name])
        layers = list(self.pages.values())
        try:
            for pages in layers:
                pages.prepare_moves(moves)
        except ThreadConflict:
            return False
        try:
            for pages in layers:
                pages.rewrite(new, moves, rewrite.emptied)
        except BaseException:
            sizes = {each: rewrite.slabs.slabs[each] for each in rewrite.emptied}
            for pages in layers:
                pages.undo_rewrite(new, moves, sizes)
            raise
        self.moves += 1
        return True
