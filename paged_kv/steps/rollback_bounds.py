"""Tells how far a sequence can be rolled back: not all of its earlier tokens are held.

A ring holds the latest tokens, and the inputs of rows that layers append are kept for a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import mlx.core as mx

from paged_kv.allocator.errors import RollbackError
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.pool.window import DEFAULT_WRITE_CHUNK
from paged_kv.steps.progress import LayerProgress


@dataclass(frozen=True, eq=False)
class GroupInputs:
    """The inputs of a sequence's latest tokens, which rows of an open group are computed from: see
    `AppendedRows`. They are more than are in the group: a trim may open an earlier one again.

    Attributes:
        step: the tokens' inputs, in order, each array [1, tokens, dim].
    """

    step: tuple[mx.array, ...] = ()

    def __len__(self) -> int:
        return sum(each.shape[1] for each in self.step)

    def followed_by(self, inputs: mx.array, most: int) -> GroupInputs:
        """These and those of the next tokens, the last `most` of them or a few more."""
        known, steps = inputs.shape[1], [inputs[:, -most:]]
        for each in reversed(self.step):
            if known >= most:
                break
            steps.append(each)
            known += each.shape[1]
        return GroupInputs(tuple(reversed(steps)))

    def without_last(self, count: int) -> GroupInputs:
        """These but for those of the last `count` tokens."""
        steps = list(self.step)
        while count and steps:
            last = steps.pop()
            if last.shape[1] > count:
                steps.append(last[:, :-count])
                break
            count -= last.shape[1]
        return GroupInputs(tuple(steps))

    def last(self, count: int) -> mx.array:
        """Those of the last `count` tokens, at least 1, [1, count, dim]."""
        known = 0
        for index, each in enumerate(reversed(self.step), 1):
            known += each.shape[1]
            if known >= count:
                steps = list(self.step[-index:])
                return (mx.concatenate(steps, axis=1) if index > 1 else steps[0])[:, -count:]
        raise AssertionError(f"the inputs of {count} tokens were asked for, {known} are kept")


@dataclass(frozen=True)
class RollbackBounds:
    """What bounds the rollback of a sequence. It never changes in place: an undo and forks need the
    former one.

    Attributes:
        pool: the sequence's pool.
        trimmed: by group with a window, the most tokens that any layer had before a trim: the ring
            has overwritten tokens too far before so many.
        inputs: of layers that append rows, what open groups are computed from, by layer and name.
    """

    pool: PagePool
    trimmed: Mapping[LayerGroup, int] = field(default_factory=dict)
    inputs: Mapping[tuple[int, str], GroupInputs] = field(default_factory=dict)

    def written(self, group: LayerGroup, layers: LayerProgress) -> int:
        """The most tokens that any layer of a group with a window ever had."""
        return max(self.trimmed.get(group, 0), layers.longest(group.layers))

    def after_trim(self, group: LayerGroup, tokens: int) -> RollbackBounds:
        """The bounds after a trim of a layer that had so many tokens."""
        if group.window is None or tokens <= self.trimmed.get(group, 0):
            return self
        return replace(self, trimmed={**self.trimmed, group: tokens})

    def with_inputs(self, layer: int, name: str, inputs: mx.array) -> RollbackBounds:
        """The bounds after a step that adds these inputs to open groups. They are kept for as many
        tokens as rings can roll back."""
        chunks = [window.write_chunk for window in self.pool.windows.values()]
        most = self.pool.rows[layer].rate + min(chunks, default=DEFAULT_WRITE_CHUNK)
        kept = self.inputs.get((layer, name), GroupInputs()).followed_by(inputs, most)
        self.pool.unwritten.add(kept)
        return replace(self, inputs={**self.inputs, (layer, name): kept})

    def without_last_inputs(self, layer: int, count: int) -> RollbackBounds:
        """The bounds without the inputs of a layer's last `count` tokens."""
        inputs = {
            key: inputs.without_last(count) if key[0] == layer else inputs
            for key, inputs in self.inputs.items()
        }
        return replace(self, inputs=inputs)

    def most(self, layers: LayerProgress, length: int) -> int:
        """The most tokens that can be trimmed of a sequence of that length."""
        windows, rows = self.pool.windows, self.pool.rows
        in_rings = [
            layers.of(each).tokens - self._shortest_of_ring(each, layers) for each in windows
        ]
        in_rows = [length - self._shortest_of_rows(each, layers) for each in rows]
        return max(0, min([length, *in_rings, *in_rows]))

    def require(self, count: int, layer: int, layers: LayerProgress, length: int) -> None:
        """Require that the last `count` tokens of a layer can be trimmed.

        Raises:
            RollbackError: the ring of this or another layer has overwritten tokens that would be
                needed, or inputs that would be needed are not kept.
        """
        target = max(0, layers.of(layer).tokens - count)
        for other in self.pool.windows:
            if target < min(self._shortest_of_ring(other, layers), layers.of(other).tokens):
                raise RollbackError(count, self.most(layers, length))
        for other, rows in self.pool.rows.items():
            if target % rows.rate and target < self._shortest_of_rows(other, layers):
                raise RollbackError(count, self.most(layers, length))

    def _shortest_of_ring(self, layer: int, layers: LayerProgress) -> int:
        """The shortest length to which a layer with a window can be trimmed."""
        written = self.written(self.pool.group_of(layer), layers)
        return self.pool.windows[layer].shortest_rollback(written)

    def _shortest_of_rows(self, layer: int, layers: LayerProgress) -> int:
        """The shortest length to which a layer that appends rows can be trimmed wherever its group
        is open."""
        rows, length = self.pool.rows[layer], layers.of(layer).tokens
        kept = [len(self.inputs.get((layer, each.name), ())) for each in rows.inputs]
        first = length - min(kept, default=length)
        return -(-first // rows.rate) * rows.rate
