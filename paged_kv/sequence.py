"""A sequence: its blocks in every group, and how many tokens each layer has written."""

from __future__ import annotations

import uuid
import weakref
from typing import TYPE_CHECKING

from paged_kv.allocator.block_table import BlockTable

if TYPE_CHECKING:
    from paged_kv.layer_group import LayerGroup
    from paged_kv.page_pool import PagePool


class Sequence:
    """Owns blocks, and frees them when the last layer lets go of it.

    Layers write one after the other, so within a step their context lengths differ. Everything
    mlx-lm asks of a cache it asks layer by layer: a fork made by one layer is the fork that the
    other layers get when they ask too.

    Attributes:
        uid: names the sequence, the same for all its layers.
        context_lens: tokens written, per layer.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.uid = uuid.uuid4().hex
        self.context_lens = [0] * pool.num_layers
        self._step_began_at = list(self.context_lens)
        self._tables: dict[LayerGroup, BlockTable] = {}
        self._forks: list[tuple[weakref.ref[Sequence], set[int]]] = []
        weakref.finalize(self, _drop_tables, self._tables).atexit = False

    @property
    def length(self) -> int:
        """Tokens that at least one layer has written."""
        return max(self.context_lens)

    def table(self, group: LayerGroup) -> BlockTable:
        """The sequence's block table in a group that is open."""
        if group not in self._tables:
            self._tables[group] = group.allocator.new_table()
        return self._tables[group]

    def blocks(self, group: LayerGroup) -> tuple[int, ...]:
        """The sequence's blocks in a group, in the order of their tokens."""
        table = self._tables.get(group)
        return () if table is None else tuple(table.blocks)

    def begin_write(self, layer: int, count: int) -> bool:
        """Note that a layer is about to write `count` tokens; true if a new step begins."""
        self._forks.clear()
        begins = self.context_lens[layer] + count > self.length
        if begins:
            self._step_began_at = list(self.context_lens)
        return begins

    def advance(self, layer: int, count: int) -> None:
        """Note that a layer has written `count` tokens."""
        self.context_lens[layer] += count

    def undo_step(self) -> None:
        """Take back what layers wrote since the step began."""
        self.context_lens[:] = map(min, self.context_lens, self._step_began_at)
        self._truncate_tables()

    def trim(self, layer: int, count: int) -> None:
        """Take `count` tokens off one layer; blocks are freed when the last layer has."""
        self._forks.clear()
        self.context_lens[layer] -= count
        self._truncate_tables()

    def fork(self, layer: int) -> Sequence:
        """A sequence that shares all blocks with this one, as it is now.

        The first layer that asks makes it, and the others get the same one, each once: a layer
        that asks a second time gets a second fork.
        """
        for ref, asked in self._forks:
            fork = ref()
            if fork is not None and layer not in asked:
                asked.add(layer)
                return fork
        fork = Sequence(self.pool)
        fork.context_lens[:] = self.context_lens
        fork._step_began_at = list(self.context_lens)
        for group, table in self._tables.items():
            fork._tables[group] = group.allocator.fork(table)
        self._forks = [entry for entry in self._forks if entry[0]() is not None]
        self._forks.append((weakref.ref(fork), {layer}))
        return fork

    def _truncate_tables(self) -> None:
        for group, table in self._tables.items():
            table.truncate(max(self.context_lens[layer] for layer in group.layers))


def _drop_tables(tables: dict[LayerGroup, BlockTable]) -> None:
    # The collector may run this inside the allocator, so it must not touch blocks itself.
    for table in tables.values():
        table.allocator.drop_later(table)
