"""Defines arrays that stand for pages.

mlx-lm's models pass the arrays that a cache returns to attention. The arrays of this file name
their pages, so that attention can read the pages instead. In layers where only attention uses keys
and values, the arrays have just a shape and a dtype, and computing one raises an error. In other
layers, MLX gathers the keys and values when it computes the arrays.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from paged_kv.recognition.latent_arrays import PositionKeys, ReadArray, TokenIndices
from paged_kv.recognition.softcapped_arrays import GroupedArray, TransposedKeys
from paged_kv.steps.read import GatheredRead, PagedRead


def contents_refused() -> ValueError:
    """The error of new contents for a cache that are assigned, and not written."""
    return ValueError(
        "keys and values of a paged cache are in its pages, and assigned numbers do not go there: "
        "write them with update_and_fetch(keys, values), to a cache of make_cache() if they "
        "replace others, and remove tokens with trim(n)"
    )


class _PagedArray(ReadArray):
    """Numbers of a read, which attention can read from its pages.

    Attributes:
        read: the read.
        tiles: how often the heads of the pages follow each other in this array.
    """

    read: PagedRead
    tiles = 1

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(self.read, GatheredRead) and not self.read.counted:
            raise contents_refused()
        super().__setitem__(index, value)

    def astype(self, dtype: mx.Dtype, stream: Any = None) -> mx.array:
        """Of a dtype that holds the same numbers, an array that still stands for its read."""
        cast = super().astype(dtype, stream)
        return self._followed_by(cast, 1) if dtype in (self.dtype, mx.float32) else cast

    def tiled(self, result: mx.array, repetitions: Any) -> mx.array:
        """`result`, which is mx.tile(self, repetitions), as an array that still stands for its read
        if only heads were repeated."""
        if not isinstance(repetitions, list | tuple) or len(repetitions) != 4:
            return result
        tokens_stay = (repetitions[0], *repetitions[2:]) == (1, 1, 1)
        return self._followed_by(result, repetitions[1]) if tokens_stay else result

    def grouped(self, result: mx.array, axis: Any) -> mx.array:
        """`result`, which is mx.expand_dims(self, axis), as an array that still stands for its read
        if the axis is that of grouped queries."""
        if self.is_changed or not self.is_as_held or axis != 2:
            return result
        return GroupedArray.of(result, self.read, holds_values=self.holds_values)

    def like_this(self, gathered: mx.array) -> mx.array:
        """Numbers gathered for this array's read, with its dtype and tiles."""
        cast = gathered.astype(self.dtype)
        return cast if self.tiles == 1 else mx.tile(cast, [1, self.tiles, 1, 1])

    def taken_along(self, indices: mx.array, axis: int | None) -> mx.array:
        """`mx.take_along_axis` of this array, which reads no other pages if tokens are taken."""
        chosen = self._tokens_at(indices, axis)
        if chosen is not None:
            tokens = self.read.gather_tokens(chosen, of_values=self.holds_values)
            if tokens is not None:
                return tokens
        keys, values = self.read.gather()
        gathered = self.like_this(values if self.holds_values else keys)
        return mx.take_along_axis(gathered, indices, axis)

    def _tokens_at(self, indices: mx.array, axis: int | None) -> mx.array | None:
        """The tokens [B, K] of the pages that these are indices of; None if they are not."""
        batch, _, length, dim = self.shape
        is_whole = indices.ndim == 4 and indices.shape[:2] == (batch, 1)
        if not is_whole or axis not in (2, -2) or not self.is_as_held:
            return None
        if isinstance(indices, TokenIndices) and not indices.is_changed:
            return indices.tokens if indices.shape[3] == dim else None
        if indices.shape[3] != 1 or dim == 1:
            return None
        tokens = indices[:, 0, :, 0]
        return mx.where(tokens < 0, tokens + length, tokens).astype(mx.uint32)

    def _followed_by(self, result: mx.array, tiles: int) -> mx.array:
        if self.is_changed:
            return result
        array = type(self)(result)
        array.read, array.tiles = self.read, self.tiles * tiles
        array.is_as_held = self.is_as_held and tiles == 1 and result.dtype == self.dtype
        return array


class PagedKeys(_PagedArray):
    """Keys [B, k_heads, T, k_dim] of all tokens so far; latents where attention is latent."""

    def swapaxes(self, axis1: int, axis2: int, **options: Any) -> mx.array:
        swapped: mx.array = super().swapaxes(axis1, axis2, **options)
        if self.is_changed or not self.is_as_held or {axis1 % 4, axis2 % 4} != {2, 3}:
            return swapped
        return TransposedKeys.of(swapped, self.read)


class PagedValues(_PagedArray):
    """Values [B, v_heads, T, v_dim] of all tokens so far; position keys where attention is
    latent."""

    holds_values = True

    def swapaxes(self, axis1: int, axis2: int, **options: Any) -> mx.array:
        swapped: mx.array = super().swapaxes(axis1, axis2, **options)
        if self.is_changed or self.tiles > 1 or {axis1 % 4, axis2 % 4} != {2, 3}:
            return swapped
        return PositionKeys.of(swapped, self.read)


def gathered_arrays(read: PagedRead, *, counted: bool = True) -> tuple[PagedKeys, PagedValues]:
    """Keys and values that stand for the pages of a read, and are gathered when computed; see
    `GatheredRead`."""
    gathered = GatheredRead(read, counted=counted)
    keys, values = PagedKeys(gathered.gathered[0]), PagedValues(gathered.gathered[1])
    keys.read = values.read = gathered
    # These live as long as the read, and so as any array that was made of the keys or values.
    read.pages.lazy_reads.watch(gathered.gathered, read.group_step.metadata)
    return keys, values
