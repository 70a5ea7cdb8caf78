"""The memory of all sequences of one model: slabs, and the blocks handed out of them."""

from __future__ import annotations

import itertools
import logging
import weakref
from functools import partial

import mlx.core as mx

from paged_kv.allocator.block_table import Write, blocks_needed
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.kernels.backend import choose_backend
from paged_kv.kernels.layer_geometry import LayerGeometry
from paged_kv.kernels.layer_pages import LayerPages
from paged_kv.kernels.memory import recommended_bytes
from paged_kv.kernels.page_format import PAGE_SIZE, page_format_named
from paged_kv.kernels.page_rows import PageRows
from paged_kv.layer_group import LayerGroup
from paged_kv.paged_array import PagedKeys, PagedValues, paged_arrays
from paged_kv.sequence import Sequence
from paged_kv.stats import PoolStats

logger = logging.getLogger("paged_kv")

# Loaded prompt caches look here for a pool to live in.
_pools: weakref.WeakSet[PagePool] = weakref.WeakSet()
_serials = itertools.count()


class PagePool:
    """Pages for `num_layers` layers under one byte budget.

    Args:
        num_layers: layers that keep keys and values.
        page_format: how pages hold numbers: "fp16", the model's own 16 bits.
        max_bytes: the most that slabs may take. None means 80 % of what the machine recommends,
            less what is in use.
        name: what log messages call the pool.

    Raises:
        ValueError: an argument is out of its range; the message says which.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        page_format: str = "fp16",
        max_bytes: int | None = None,
        name: str = "pool",
    ) -> None:
        self.num_layers = num_layers
        self.name = name
        self.serial = next(_serials)
        self.page_format = page_format_named(page_format)
        self.backend = choose_backend()
        self.budget = ByteBudget(recommended_bytes() if max_bytes is None else max_bytes)
        layers = LayerGroup(range(num_layers), self.page_format, self.backend, self.budget)
        self.groups = [layers]
        self._gather_fallbacks = 0
        self._fallback_reported = False
        _pools.add(self)
        logger.info("%s: up to %s bytes of pages", name, f"{self.budget.max_bytes:,}")

    def __repr__(self) -> str:
        return (
            f"PagePool {self.serial} ({self.name}, {self.num_layers} layers, "
            f"{self.page_format.name} pages)"
        )

    @property
    def is_open(self) -> bool:
        """Whether anything was written, so that it is known how large a block is."""
        return any(group.is_open for group in self.groups)

    def group_of(self, layer: int) -> LayerGroup:
        """The group that a layer belongs to."""
        return next(group for group in self.groups if layer in group.layers)

    def append(
        self, layer: int, sequences: list[Sequence], keys: mx.array, values: mx.array
    ) -> None:
        """Write S new tokens of each sequence into its pages, in one layer, padding left out.

        keys [B, k_heads, S, k_dim], values [B, v_heads, S, v_dim], B the number of sequences.

        Raises:
            ValueError: shapes or dtypes are not what this layer holds; nothing was changed.
            PoolExhausted: the budget does not hold the blocks. Nothing was changed, except that
                in a pool's first step, when layers are not known yet, the whole step is undone.
        """
        geometry = LayerGeometry.of(keys, values)
        count = keys.shape[2]
        if keys.shape[0] != len(sequences):
            raise ValueError(
                f"layer {layer} holds {len(sequences)} sequences, got a batch of {keys.shape[0]}"
            )
        if count == 0:
            return
        try:
            pages = self._prepare(layer, sequences, geometry, count)
        except PoolExhausted:
            for sequence in sequences:
                sequence.undo_step()
            raise
        for sequence in sequences:
            sequence.advance(layer, count)
        pages.write(keys, values, self.rows(layer, sequences))

    def reserve(self, layer: int, sequences: list[Sequence], count: int) -> None:
        """Own blocks in all groups for the next `count` tokens of each sequence.

        Writing does so by itself. A model that is asked for masks first can be stopped here,
        before any of its layers has changed anything.

        Raises:
            PoolExhausted: the budget does not hold the blocks; nothing was changed.
        """
        writes = self._unreserved(layer, sequences, count)
        for group, group_writes in writes.items():
            group.allocator.ensure_free(blocks_needed(group_writes))
        for group, group_writes in writes.items():
            for write in group_writes:
                group.copy_pages(write.table.reserve(write.start, write.end))

    def read(self, layer: int, sequences: list[Sequence]) -> tuple[PagedKeys, PagedValues]:
        """All keys and values of the sequences in one layer.

        Raises:
            ValueError: the layer was not written yet.
        """
        pages = self.group_of(layer).pages.get(layer)
        if pages is None:
            raise ValueError(f"layer {layer} has no keys and values yet: nothing was written")
        rows = self.rows(layer, sequences)
        return paged_arrays(pages, rows, partial(self._note_gather, layer))

    def rows(self, layer: int, sequences: list[Sequence]) -> PageRows:
        """The sequences' pages in one layer; the same object for all layers of a step."""
        group = self.group_of(layer)
        rows = PageRows(
            block_tables=tuple([sequence.blocks(group) for sequence in sequences]),
            context_lens=tuple([sequence.context_lens[layer] for sequence in sequences]),
            right_padding=tuple([sequence.padding[layer].right for sequence in sequences]),
        )
        if rows != group.latest_rows:
            group.latest_rows = rows
        return group.latest_rows

    def geometry(self, layer: int) -> LayerGeometry | None:
        """What a layer holds, or None before its first write."""
        pages = self.group_of(layer).pages.get(layer)
        return None if pages is None else pages.geometry

    def page_views(self, layer: int, sequence: Sequence) -> list[mx.array]:
        """Views of a layer's pages of a sequence, in the order of their tokens; they cost nothing.

        While one lives, a write may have to copy the whole slab: never keep them.
        """
        group = self.group_of(layer)
        used = -(-sequence.context_lens[layer] // PAGE_SIZE)
        return [group.pages[layer].page(block) for block in sequence.blocks(group)[:used]]

    def load(
        self,
        layer: int,
        sequence: Sequence,
        geometry: LayerGeometry,
        context_len: int,
        contents: list[mx.array],
    ) -> None:
        """Fill a layer of a sequence that is empty there, with pages as `page_views` gave them.

        Raises:
            ValueError: the pages are not what the layer holds, or not as many as the tokens need.
            PoolExhausted: the budget does not hold them; nothing was changed.
        """
        group = self.group_of(layer)
        pages = group.open_layer(layer, geometry)
        expected = [(pages.layout.page_units, pages.layout.unit_words)] * -(
            -context_len // PAGE_SIZE
        )
        if [tuple(content.shape) for content in contents] != expected:
            raise ValueError(
                f"layer {layer} needs {len(expected)} pages of {expected[:1]} words for "
                f"{context_len} tokens, got {[tuple(content.shape) for content in contents]}"
            )
        self.reserve(layer, [sequence], context_len)
        pages.load(dict(zip(sequence.blocks(group), contents, strict=False)))
        sequence.advance(layer, context_len)

    def can_admit(self, tokens: int) -> bool:
        """Whether a new sequence of `tokens` tokens would fit now. O(slabs).

        Before the first write it is not known how large a block is, and the answer is yes.
        """
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        blocks = -(-tokens // PAGE_SIZE)
        return all(blocks <= group.allocator.available() for group in self.groups if group.is_open)

    def compact(self) -> int:
        """Move pages out of the emptiest slabs and give those back; returns the blocks moved.

        Call it between steps: it waits for what is in flight, and copies each moved page once.
        """
        return sum(group.compact() for group in self.groups)

    def clear(self) -> int:
        """Give back every slab that holds no used block; returns how many."""
        open_groups = [group for group in self.groups if group.is_open]
        return sum(group.allocator.unmap_empty_slabs() for group in open_groups)

    def check(self) -> None:
        """Verify every invariant; an AssertionError names the one that is broken."""
        for group in self.groups:
            if group.is_open:
                group.allocator.check()

    def stats(self) -> PoolStats:
        """A snapshot of what the pool holds."""
        groups = [group.allocator.stats() for group in self.groups if group.is_open]
        return PoolStats(
            page_format=self.page_format.name,
            backend=self.backend.name,
            blocks_used=sum(group.blocks_used for group in groups),
            blocks_free=sum(group.blocks_free for group in groups),
            blocks_shared=sum(group.blocks_shared for group in groups),
            table_entries=sum(group.table_entries for group in groups),
            slabs=sum(group.slabs for group in groups),
            bytes_mapped=sum(group.bytes_mapped for group in groups),
            bytes_active=sum(group.bytes_active for group in groups),
            bytes_budget=self.budget.max_bytes,
            cow_copies=sum(group.cow_copies for group in groups),
            allocation_failures=sum(group.allocation_failures for group in groups),
            gather_fallbacks=self._gather_fallbacks,
        )

    def _prepare(
        self, layer: int, sequences: list[Sequence], geometry: LayerGeometry, count: int
    ) -> LayerPages:
        """Everything that a write needs, so that the write itself cannot fail."""
        group = self.group_of(layer)
        pages = group.open_layer(layer, geometry)
        for sequence in sequences:
            if sequence.begin_write(layer, count) and sequence.length:
                group.settle()
        self.reserve(layer, sequences, count)
        return pages

    def _unreserved(
        self, layer: int, sequences: list[Sequence], count: int
    ) -> dict[LayerGroup, list[Write]]:
        """The writes of a step that no earlier layer has reserved blocks for, by group."""
        writes: dict[LayerGroup, list[Write]] = {}
        open_groups = [group for group in self.groups if group.is_open]
        for sequence in sequences:
            start = sequence.context_lens[layer]
            end = start + sequence.padding[layer].own(count)
            for group in open_groups:
                table = sequence.table(group)
                if end > start and not table.is_reserved(end):
                    writes.setdefault(group, []).append(Write(table, start, end))
        return writes

    def _note_gather(self, layer: int) -> None:
        self._gather_fallbacks += 1
        if not self._fallback_reported:
            self._fallback_reported = True
            logger.warning(
                "%s: attention of layer %d does not read pages; keys and values are gathered "
                "for it, which is right but slower (said once; stats() counts)",
                self.name,
                layer,
            )


def find_pool(num_layers: int, page_format: str) -> PagePool | None:
    """The latest pool still in use that has so many layers and that format."""
    fitting = [
        pool
        for pool in _pools
        if pool.num_layers == num_layers and pool.page_format.name == page_format
    ]
    return max(fitting, key=lambda pool: pool.serial, default=None)
