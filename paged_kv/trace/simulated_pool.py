"""Simulates a pool without pages, to replay a trace on."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from paged_kv.allocator.allocator_stats import counted
from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.block_map import block_map
from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefixes.eviction import LEAST_WORTH, EvictionPolicy
from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlocks
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.ring import Ring
from paged_kv.monitor.process_view import PoolView
from paged_kv.pool.stats import GroupStats, PoolStats


@dataclass(eq=False)
class SimulatedPool:
    """A pool without pages."""

    name: str
    budget: ByteBudget
    page_size: int
    policy: EvictionPolicy = LEAST_WORTH
    groups: list[SimulatedGroup] = field(default_factory=list)
    tokens_asked: int = 0
    tokens_found: int = 0
    evicted: int = 0

    def __post_init__(self) -> None:
        self.index = PrefixIndex(self.page_size, policy=self.policy)
        self.out_of_window = OutOfWindowBlocks(self.policy)

    def give_back(self) -> None:
        """Unmap every slab in which no block is used."""
        for group in self.groups:
            group.allocator.unmap_empty_slabs()

    def note_found(self, group: SimulatedGroup, num_tokens: int) -> None:
        """Count a prompt's prefix hit once, not for every group."""
        if group is next((each for each in self.groups if each.ring is None), self.groups[0]):
            self.tokens_found += num_tokens

    def stats(self) -> PoolStats:
        """A snapshot."""
        self.out_of_window.drain()
        groups = [
            GroupStats(
                **counted(each.allocator.stats()), window=each.ring.window if each.ring else None
            )
            for each in self.groups
        ]
        return PoolStats(
            page_format=groups[0].formats[0].page_format if groups else "fp16",
            backend="replay",
            bytes_budget=self.budget.max_bytes,
            groups=tuple(groups),
            evictions={"room": self.evicted},
            prefix_queries=self.tokens_asked,
            prefix_hits=self.tokens_found,
        )

    def view(self, number: int) -> PoolView:
        """A snapshot with its map."""
        slabs = [(n, slab) for n, g in enumerate(self.groups) for slab in block_map(g.allocator)()]
        return PoolView(self.name, number, self.stats(), tuple(slabs))


@dataclass(eq=False)
class SimulatedGroup:
    """The layers of a pool that share block tables."""

    pool: SimulatedPool
    ring: Ring | None
    sizes: dict[str, int]

    def __post_init__(self) -> None:
        (first, size), *others = self.sizes.items()
        budget, page_size = self.pool.budget, self.pool.page_size
        self.allocator = BlockAllocator(budget, size, page_size, page_format=first)
        for page_format, size in others:
            self.allocator.add_format(page_format, size)

    def resize(self, page_format: str, size: int) -> None:
        """From now on a block of a format, which may be new, takes `size` bytes."""
        self.allocator.add_format(page_format, size)
        # The mapped slabs may not fit the budget at the new size; then the old size stays.
        with suppress(PoolExhausted):
            self.allocator.set_block_bytes({page_format: size})


@dataclass(eq=False)
class SimulatedTable:
    """A block table with made-up token ids, which are equal where tables share tokens."""

    group: SimulatedGroup
    table: BlockTable
    tag: int
    tokens: list[int] = field(default_factory=list)
    was_furthest: int = 0

    def recode(self, start: int) -> None:
        """Recode the full blocks before a write from `start` on, as many as the budget holds."""
        allocator = self.group.allocator
        for name in self.table.full_formats:
            # Mapping a slab for the last ones may have moved others.
            blocks = self.table.unrecoded(start).get(name, [])
            with suppress(PoolExhausted):
                allocator.ensure_free({name: len(blocks)})
                moves = dict(zip(blocks, allocator.format_named(name).free, strict=False))
                allocator.apply_moves(moves)

    def write(self, start: int, end: int) -> None:
        """Write the positions [start, end) with tokens of this table's own."""
        self.was_furthest = max(self.was_furthest, end)
        if self.group.ring is None:
            self.tokens[start:] = [token_of(self.tag, at) for at in range(start, end)]

    def trim(self, tokens: int, tag: int) -> None:
        """Keep the first tokens; later ones get another tag, so they differ from the old ones."""
        ring, size = self.group.ring, self.group.pool.page_size
        if ring is not None and self.was_furthest > ring.size * size:
            self.table.rewind(tokens)
        elif tokens <= len(self.table.blocks) * size:
            self.table.truncate(tokens)
        del self.tokens[tokens:]
        self.tag = tag


def token_of(tag: int, position: int) -> int:
    """A token id that is unique for each tag and position."""
    return tag << 32 | position
