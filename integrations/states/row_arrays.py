"""Defines the arrays that a `LayerRows` gives to its model.

A model appends rows with `mx.concatenate`, and reads chosen ones as rows of a matrix:

    cache.rows = mx.concatenate([cache.rows, new], axis=1)
    chosen = rows.reshape(count, dim)[indices]

Each array holds the same numbers as MLX's own result, as a lazy graph, so that models may do
anything else with it. It also knows its pages, so that only chosen rows need be gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from paged_kv.pool.appended_rows import AppendedRows
from paged_kv.recognition.latent_arrays import FollowedArray
from paged_kv.steps.read import UncountedRead


class GrowingArray(FollowedArray):
    """An array of a cache, [1, count, dim], to which a model appends.

    Attributes:
        note: takes what the model appends.
    """

    note: Callable[[mx.array], None]

    def grown(self, arrays: Any, axis: int) -> None:
        """Note that the model concatenates these arrays, of which this is the first."""
        if len(arrays) == 2 and axis in (1, -2) and not self.is_changed:
            self.note(arrays[1])


class RowArray(GrowingArray):
    """All rows of a sequence, [1, count, dim].

    Attributes:
        read: of their pages.
        layout: how tokens share a row.
    """

    read: UncountedRead
    layout: AppendedRows

    @classmethod
    def of(cls, read: UncountedRead, layout: AppendedRows, count: int) -> RowArray:
        keys, values = [each[:, :, : count * layout.rate] for each in read.gathered]
        array = cls(layout.rows(keys, values))
        array.read, array.layout = read, layout
        return array

    def grown(self, arrays: Any, axis: int) -> None:
        # The cache writes the new rows, and never computes the array of all.
        self.read.leave_unread()
        super().grown(arrays, axis)

    def reshape(self, *shape: Any, **options: Any) -> mx.array:
        reshaped: mx.array = super().reshape(*shape, **options)
        if self.is_changed or reshaped.shape != self.shape[1:]:
            return reshaped
        matrix = RowMatrix(reshaped)
        matrix.read, matrix.layout = self.read, self.layout
        return matrix


class RowMatrix(FollowedArray):
    """The same rows as a matrix [count, dim]."""

    read: UncountedRead
    layout: AppendedRows

    def __getitem__(self, index: Any) -> mx.array:
        is_choice = isinstance(index, mx.array) and index.ndim == 1 and not self.is_changed
        # To gather all is quicker than as many one by one.
        chosen = self._gathered(index) if is_choice and index.size < self.shape[0] else None
        return super().__getitem__(index) if chosen is None else chosen

    def _gathered(self, index: mx.array) -> mx.array | None:
        rate = self.layout.rate
        tokens = index.astype(mx.int32)[:, None] * rate + mx.arange(rate, dtype=mx.int32)
        tokens = tokens.reshape(1, -1).astype(mx.uint32)
        keys = self.read.gather_tokens(tokens, of_values=False)
        values = self.read.gather_tokens(tokens, of_values=True)
        if keys is None or values is None:
            return None
        return self.layout.rows(keys, values)[0]
