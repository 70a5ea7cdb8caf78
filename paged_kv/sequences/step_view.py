"""Describes a step in the layers of one group: its attention metadata, and the masks it accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from paged_kv.allocator.block_table import BlockTable
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.stand_in import stand_in
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.sequences.masks import PagedMask
from paged_kv.sequences.sequence import Sequence
from paged_kv.sequences.step_metadata import StepPart, attention_metadata, step_parts
from paged_kv.sequences.step_row import StepRow


class _Expected(NamedTuple):
    """The shapes and dtypes that layers of one geometry get in this step, and arrays with the
    shapes of all tokens, which cannot be computed."""

    given: tuple[Any, ...]
    keys: mx.array
    values: mx.array


_NO_MASK = object()


class StepView:
    """A step in the layers of one group.

    Args:
        group: the layers.
        rows: the step's rows.
        read_first: whether the step's queries attend before any page holds it.
        count: S of a step that is to be written, 0 of one that is only read.
        scratch: see `step_parts`.

    Attributes:
        attention_metadata: where the tokens are after the step, the same object for all layers.
        parts: the parts that the step is written and attended to in; none if it need not be cut.
        needs_step: whether reads need the step's keys and values besides its pages.
        moves: the group's `moves` when the metadata was made.
        expected: the inputs of layers, by the id of their geometry object, which layers share.
        mask: the latest mask that kernels can express by lengths and a window.
        queries: the number of queries of that mask.
        causal: of the `Attention` for that mask.
        window: of the `Attention` for that mask, and for its first query if there is
            a wider window.
        wider_window: that argument for its other queries; None if all have the same.
    """

    def __init__(
        self,
        group: LayerGroup,
        rows: list[StepRow],
        *,
        read_first: bool,
        count: int = 0,
        scratch: Mapping[Sequence, BlockTable] | None = None,
    ) -> None:
        self.group = group
        self.read_first = read_first
        self._count = count
        self._scratch = scratch or {}
        self._rows = rows
        self._locate()
        self.mask: object = _NO_MASK
        self.queries = 0
        self.causal = False
        self.window: int | None = None
        self.wider_window: int | None = None
        self.expected: dict[int, _Expected] = {}

    def expect(self, layer: int, keys: mx.array, values: mx.array) -> _Expected:
        """Note the inputs of layers with this geometry.

        Raises:
            ValueError: they do not fit the layer.
        """
        geometry = self.group.open_layer(layer, LayerGeometry.of(keys, values)).geometry
        batch, length = keys.shape[0], max(self.attention_metadata.ends, default=0)
        expected = self.expected[id(geometry)] = _Expected(
            (keys.shape, values.shape, keys.dtype, values.dtype),
            stand_in((batch, geometry.k_heads, length, geometry.k_dim), geometry.k_dtype),
            stand_in((batch, geometry.v_heads, length, geometry.v_dim), geometry.v_dtype),
        )
        return expected

    def follow_moves(self) -> None:
        """Make the metadata again if pages have moved."""
        if self.moves != self.group.moves:
            self._locate()

    def _locate(self) -> None:
        group, rows = self.group, self._rows
        self.attention_metadata = attention_metadata(group, rows, read_first=self.read_first)
        self.parts: list[StepPart] = []
        if self._count > 1 and group.window is None:
            self.parts = step_parts(group, rows, self._count, self._scratch)
        self.needs_step = self.read_first or bool(self.parts)
        self.moves = group.moves

    def sees_as(self, mask: mx.array | str | None, queries: int) -> bool:
        """Whether lengths and a window express the mask, so that a kernel needs no array."""
        sees = self._sees_as(mask, queries) and not (self.parts and mask is None)
        if sees:
            self.mask, self.queries, self.causal = mask, queries, mask is not None
            self.window, self.wider_window = self._windows(mask, queries)
        return sees

    def _windows(self, mask: object, queries: int) -> tuple[int | None, int | None]:
        window = self.group.window
        asked = mask.window if isinstance(mask, PagedMask) else self._latest_seen(mask, queries)
        if window is None or window.sink_tokens:
            return asked, None
        if asked is None and mask is not None:
            asked = max(self.attention_metadata.visible_lens)
        if asked is None or asked <= window.size or queries == 1:
            return min(window.size, asked or window.size), None
        return window.size, asked

    def _sees_as(self, mask: mx.array | str | None, queries: int) -> bool:
        window = self.group.window
        if window is not None and window.sink_tokens:
            return not self._hides_any(window.size + window.sink_tokens) and not isinstance(
                mask, mx.array
            )
        if isinstance(mask, PagedMask):
            return mask.hides_in(self.attention_metadata, queries) and self._is_held(
                mask.window, queries
            )
        if mask is None:
            return window is None or queries == 1
        if isinstance(mask, mx.array) or mask != "causal":
            return self._latest_seen(mask, queries) is not None
        return self._is_held(max(self.attention_metadata.visible_lens), queries)

    def _latest_seen(self, mask: object, queries: int) -> int | None:
        """How many of the latest tokens the query of a step of one token sees by a mask of the
        model's own, if the layers have a window and it sees those only. Computes the mask.

        So models that attend by chunks read pages while they decode.
        """
        if queries != 1 or len(self._rows) != 1 or self.group.window is None:
            return None
        if not isinstance(mask, mx.array) or mask.dtype != mx.bool_:
            return None
        if mask.size != self.attention_metadata.visible_lens[0]:
            return None
        seen = np.asarray(mask).reshape(-1)
        count = int(seen.sum())
        return count if count and seen[-count:].all() else None

    def _hides_any(self, longest: int) -> bool:
        """Whether a query with sink tokens does not see all tokens."""
        return (
            any(self.attention_metadata.first_tokens)
            or max(self.attention_metadata.visible_lens) > longest
        )

    def _is_held(self, asked: int | None, queries: int) -> bool:
        """Whether the queries can attend to a window of `asked` tokens. It may be wider by one than
        that of the layers: then it ends where theirs does for the first query."""
        window = self.group.window
        if window is None:
            return True
        return asked is not None and (queries == 1 or asked <= window.size + 1)
