"""Describes a step in the layers of one group."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.stand_in import stand_in
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.step_metadata import StepPart, attention_metadata, step_parts
from paged_kv.steps.step_row import StepRow, undo_step
from paged_kv.steps.transaction import Transaction
from paged_kv.steps.visibility import Visibility, visible


class _Arrays(NamedTuple):
    """The shapes and dtypes that layers of one geometry get in this step, and arrays with the
    shapes of all tokens, which cannot be computed."""

    given: tuple[Any, ...]
    keys: mx.array
    values: mx.array


class Seen(NamedTuple):
    """What the queries of a step see by a mask, see `visible`."""

    mask: object
    queries: int
    visibility: Visibility | None


_NOTHING = Seen(None, 0, None)


class GroupStep:
    """A step in the layers of one group.

    Args:
        pool: the sequences' pool.
        group: the layers.
        rows: the step's rows.
        transaction: of the step.
        read_first: whether the step's queries attend before any page holds it.
        count: S of a step that is to be written, 0 of one that is only read.

    Attributes:
        metadata: where the tokens are after the step, the same object for all layers.
        parts: the parts that the step is written and attended to in; none if it need not be cut.
        needs_step: whether reads need the step's keys and values besides its pages.
        moves: the group's `moves` when the metadata was made.
        arrays: the arrays of layers, by the id of their geometry object, which layers share.
        seen: what the latest mask lets the queries see: layers usually get the same one.
    """

    def __init__(
        self,
        pool: PagePool,
        group: LayerGroup,
        rows: list[StepRow],
        transaction: Transaction,
        *,
        read_first: bool,
        count: int = 0,
    ) -> None:
        self.pool = pool
        self.group = group
        self.read_first = read_first
        self._count = count
        self.transaction = transaction
        self._rows = rows
        self._locate()
        self.arrays: dict[int, _Arrays] = {}
        self.seen: Seen = _NOTHING

    def arrays_for(self, layer: int, keys: mx.array, values: mx.array) -> _Arrays:
        """The arrays of a layer that gets these keys and values; layers of its geometry share them.

        Raises:
            ValueError: they do not fit the layer.
        """
        geometry = self.group.open_layer(layer, LayerGeometry.of(keys, values)).geometry
        batch, length = keys.shape[0], max(self.metadata.ends, default=0)
        arrays = self.arrays[id(geometry)] = _Arrays(
            (keys.shape, values.shape, keys.dtype, values.dtype),
            stand_in((batch, geometry.k_heads, length, geometry.k_dim), geometry.k_dtype),
            stand_in((batch, geometry.v_heads, length, geometry.v_dim), geometry.v_dtype),
        )
        return arrays

    def see_by(self, mask: mx.array | str | None, queries: int) -> Seen:
        """Find out what a mask lets the queries see, and note it."""
        found = None
        if mask is not None or not self.parts:
            found = visible(mask, queries, self.metadata, self.group.window)
        self.seen = Seen(mask, queries, found)
        return self.seen

    def follow_moves(self) -> None:
        """Make the metadata again if pages have moved."""
        if self.moves != self.group.moves:
            self._locate()

    def forget_deferred(self) -> None:
        """Do not write what layers have deferred, which was undone."""
        for pages in self.group.pages.values():
            pages.forget_deferred(self.metadata)

    def undo(self) -> None:
        """As `Step.undo`, after attention of a layer of this group has failed."""
        self.forget_deferred()
        undo_step(self._rows, self.transaction)

    def _locate(self) -> None:
        group, rows = self.group, self._rows
        self.metadata = attention_metadata(group, rows, read_first=self.read_first)
        self.parts: list[StepPart] = []
        if self._count > 1 and group.window is None:
            scratch = self.transaction.scratch.get(group, {})
            self.parts = step_parts(group, rows, self._count, scratch)
        self.needs_step = self.read_first or bool(self.parts)
        self.moves = group.moves
