"""A sequence: its blocks in every group, and how far each layer has written."""

from __future__ import annotations

import uuid
import weakref
from typing import TYPE_CHECKING

from paged_kv.allocator.block_table import BlockTable
from paged_kv.padding import NO_PADDING, Padding

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
        padding: what of a batch's steps is padding in this row, per layer.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.uid = uuid.uuid4().hex
        self.context_lens = [0] * pool.num_layers
        self.padding = [NO_PADDING] * pool.num_layers
        self._step_began_at = self._progress()
        self._furthest = 0
        self._tables: dict[LayerGroup, BlockTable] = {}
        self._forks: list[tuple[weakref.ref[Sequence], set[int]]] = []
        self._others: list[weakref.ref[Sequence]] = []
        weakref.finalize(self, _drop_tables, self._tables).atexit = False

    @property
    def length(self) -> int:
        """Tokens that at least one layer has written."""
        return max(self.context_lens)

    def offset(self, layer: int) -> int:
        """The position of the next step's first token; negative if that token is padding."""
        padding = self.padding[layer]
        return self.context_lens[layer] + padding.right - padding.left

    def table(self, group: LayerGroup) -> BlockTable:
        """The sequence's block table in a group that is open."""
        if group not in self._tables:
            self._tables[group] = group.allocator.new_table()
        return self._tables[group]

    def blocks(self, group: LayerGroup) -> tuple[int, ...]:
        """The sequence's blocks in a group, in the order of their tokens."""
        table = self._tables.get(group)
        return () if table is None else table.blocks

    def begin_write(self, layer: int, count: int) -> bool:
        """Note that a layer is about to go `count` tokens further; true if a new step begins."""
        self._forks.clear()
        end = self.offset(layer) + count
        if end <= self._furthest:
            return False
        self._step_began_at = self._progress()
        self._furthest = end
        return True

    def advance(self, layer: int, count: int) -> None:
        """Note that a layer has gone `count` tokens further, padding included."""
        self.context_lens[layer] += self.padding[layer].own(count)
        self.padding[layer] = self.padding[layer].after(count)

    def undo_step(self) -> None:
        """Take back what layers wrote since the step began."""
        context_lens, padding = self._step_began_at
        self.context_lens[:] = map(min, self.context_lens, context_lens)
        self.padding[:] = padding
        self._shrink()

    def trim(self, layer: int, count: int) -> int:
        """Take `count` tokens off one layer, or all that it has; returns how many.

        Blocks are freed when the last layer has trimmed.
        """
        count = min(count, self.context_lens[layer])
        self.context_lens[layer] -= count
        self._shrink()
        return count

    def prepare(self, layer: int, padding: Padding) -> None:
        """Set what of the coming steps is padding in one layer."""
        self.padding[layer] = padding
        self._shrink()

    def finalize(self, layer: int) -> None:
        """End the steps that have padding in one layer."""
        to_trim = self.padding[layer].to_trim
        self.padding[layer] = NO_PADDING
        self.trim(layer, to_trim)

    def batch_of(self, count: int) -> list[Sequence]:
        """This sequence and new ones, `count` in all: the same ones for every layer that asks."""
        others = [ref() for ref in self._others[: count - 1]]
        others += [None] * (count - 1 - len(others))
        rows = [self, *(other or Sequence(self.pool) for other in others)]
        self._others = [weakref.ref(row) for row in rows[1:]]
        return rows

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
        fork.context_lens, fork.padding = self._progress()
        fork._shrink()
        for group, table in self._tables.items():
            fork._tables[group] = group.allocator.fork(table)
        self._forks = [entry for entry in self._forks if entry[0]() is not None]
        self._forks.append((weakref.ref(fork), {layer}))
        return fork

    def _progress(self) -> tuple[list[int], list[Padding]]:
        return list(self.context_lens), list(self.padding)

    def _shrink(self) -> None:
        """Let everything follow layers that are no longer as far as they were."""
        self._forks.clear()
        self._furthest = max(map(self.offset, range(self.pool.num_layers)))
        for group, table in self._tables.items():
            table.truncate(max(self.context_lens[layer] for layer in group.layers))


def _drop_tables(tables: dict[LayerGroup, BlockTable]) -> None:
    # The collector may run this inside the allocator, so it must not touch blocks itself.
    for table in tables.values():
        table.allocator.drop_later(table)
