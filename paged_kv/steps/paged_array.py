"""Defines arrays that stand for pages.

mlx-lm's models pass the arrays that a cache returns to attention. The arrays of this file name
their pages, so that attention can read the pages instead. In layers where only attention uses keys
and values, the arrays have just a shape and a dtype, and computing one raises an error. In other
layers, MLX gathers the keys and values when it computes the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from threading import current_thread
from typing import Any

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, NewTokens
from paged_kv.kernels.pages.errors import PagesNotRead
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.recognition.latent_arrays import PositionKeys, ReadArray, TokenIndices
from paged_kv.recognition.softcapped_arrays import GroupedArray, TransposedKeys
from paged_kv.steps.group_step import GroupStep


class PagedRead:
    """All keys and values of one layer at one step, as pages.

    Args:
        group_step: the latest step, in the layer's group.
        pages: the layer's pages.
        step_tokens: the step's keys and values, if `group_step.needs_step`.

    Attributes:
        new_tokens: those of them that no page holds.
        lock: held during reads, so that no page moves.
    """

    __slots__ = ("group_step", "lock", "new_tokens", "pages", "step_tokens")

    def __init__(
        self, group_step: GroupStep, pages: LayerPages, step_tokens: NewTokens | None
    ) -> None:
        self.group_step = group_step
        self.pages = pages
        self.lock = group_step.pool.lock
        self.step_tokens = step_tokens
        self.new_tokens = step_tokens if group_step.read_first else None

    def attend(
        self,
        queries: mx.array,
        mask: mx.array | str | None,
        *,
        scale: float,
        sinks: mx.array | None = None,
        position_queries: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array | None:
        """Attention of a step of queries [B, q_heads, S, k_dim]; see `Backend.attend`, or
        `Backend.attend_latent` with position queries. None if lengths and a window cannot express
        the mask, or if the sequences have changed since: the step then holds other tokens. An error
        undoes the step in all layers."""
        with self.lock:
            try:
                return self._attend(queries, mask, scale, sinks, position_queries, softcap)
            except BaseException:
                self.group_step.undo()
                raise

    def _attend(
        self,
        queries: mx.array,
        mask: mx.array | str | None,
        scale: float,
        sinks: mx.array | None,
        position_queries: mx.array | None,
        softcap: float | None,
    ) -> mx.array | None:
        group_step = self.group_step
        latest, count = group_step.seen, queries.shape[2]
        if latest.mask is not mask or latest.queries != count:
            latest = group_step.see_by(mask, count)
        seen = latest.visibility
        if seen is None or not group_step.transaction.is_open:
            return None
        if group_step.moves != group_step.group.moves:
            group_step.follow_moves()
        group_step.transaction.is_unread = False
        attend: Callable[..., mx.array] = self.pages.attend
        step_queries, new_tokens = [queries], self.new_tokens
        if position_queries is not None:
            attend, step_queries = self.pages.attend_latent, [queries, position_queries]
        attention = self.pages.attention(scale, seen.causal, seen.window, sinks, softcap)
        if group_step.parts and self.step_tokens is not None:
            outputs = [
                attend(
                    *[each[:, :, at] for each in step_queries],
                    metadata,
                    attention,
                    new_tokens,
                )
                for at, metadata in self._rewrite(*self.step_tokens)
            ]
            return mx.concatenate(outputs, axis=2)
        output = attend(*step_queries, group_step.metadata, attention, new_tokens)
        if seen.wider_window is None:
            return output
        # The token that only the first query's wider window reaches is not held any more.
        attention = self.pages.attention(scale, seen.causal, seen.wider_window, sinks, softcap)
        wider = attend(*step_queries, group_step.metadata, attention, new_tokens)
        return mx.concatenate([output[:, :, :1], wider[:, :, 1:]], axis=2)

    def gather_from_pages(self) -> tuple[mx.array, mx.array]:
        """Gather the keys and values, lazily: the step's own as they were given, if it has parts,
        so that nothing is quantised that a query's own page holds."""
        return self.pages.gather(self.group_step.metadata, self.step_tokens)

    def _rewrite(
        self, keys: mx.array, values: mx.array
    ) -> Iterator[tuple[slice, AttentionMetadata]]:
        """Write the parts of the step once more, so that each finds its own page in 16 bits: a part
        is written in the block of the one before."""
        for tokens, metadata, resumed, _ in self.group_step.parts:
            self.pages.copy(resumed)
            self.pages.defer(keys[:, :, tokens], values[:, :, tokens], metadata)
            yield tokens, metadata

    def gather(self) -> tuple[mx.array, mx.array]:
        """Gather the keys and values, lazily.

        Raises:
            PagesNotRead: the sequences have changed since, so the pages may hold other tokens.
        """
        with self.lock:
            group_step = self.group_step
            if not group_step.transaction.is_open:
                raise PagesNotRead(group_step.pool.name)
            group_step.transaction.is_unread = False
            group_step.follow_moves()
            group_step.pool.note_gather(group_step.group, self.pages)
            gathered = self._or_undone(self.gather_from_pages)
            self.pages.lazy_reads.leave(gathered, group_step.metadata, current_thread())
            return gathered

    def gather_tokens(self, indices: mx.array, *, of_values: bool) -> mx.array | None:
        """Gather the keys, or the values, at indices [B, K] of what `gather` returns, lazily. None
        if there is a window or more than one head, if the step is in no page yet, or if the
        sequences have changed since."""
        with self.lock:
            group_step, geometry = self.group_step, self.pages.geometry
            is_in_pages = group_step.group.window is None and not group_step.needs_step
            has_one_head = (geometry.k_heads, geometry.v_heads) == (1, 1)
            if not (group_step.transaction.is_open and is_in_pages and has_one_head):
                return None
            group_step.transaction.is_unread = False
            group_step.follow_moves()
            gather = partial(self.pages.gather_tokens, group_step.metadata, indices)
            keys, values = self._or_undone(gather)
            tokens = values if of_values else keys
            self.pages.lazy_reads.leave((tokens,), group_step.metadata, current_thread())
            return tokens

    def _or_undone(
        self, gather: Callable[[], tuple[mx.array, mx.array]]
    ) -> tuple[mx.array, mx.array]:
        """What is gathered; an error undoes the step in all layers."""
        try:
            return gather()
        except BaseException:
            self.group_step.undo()
            raise

    def leave_unread(self) -> None:
        """Note that no graph holds what was gathered for this read."""


class GatheredRead(PagedRead):
    """A read that also has its keys and values as lazily gathered arrays."""

    __slots__ = ("_is_attended", "_thread", "gathered")

    def __init__(self, read: PagedRead) -> None:
        super().__init__(read.group_step, read.pages, read.step_tokens)
        self._is_attended = True  # for `__del__`, if `gather` raises
        self._thread = current_thread()
        self.gathered = read.gather_from_pages()
        self._is_attended = False

    def __del__(self) -> None:
        if not self._is_attended:
            # A graph may still hold the gathered arrays, and be computed later.
            self.pages.lazy_reads.leave(self.gathered, self.group_step.metadata, self._thread)
            self.note_gather()

    def note_gather(self) -> None:
        """Count the gather."""
        self.group_step.pool.note_gather(self.group_step.group, self.pages)

    def attend(self, queries: mx.array, mask: Any, **options: Any) -> mx.array | None:
        output = super().attend(queries, mask, **options)
        self._is_attended |= output is not None
        return output

    def gather_tokens(self, indices: mx.array, *, of_values: bool) -> mx.array | None:
        tokens = super().gather_tokens(indices, of_values=of_values)
        self._is_attended |= tokens is not None
        return tokens

    def gather(self) -> tuple[mx.array, mx.array]:
        return self.gathered

    def leave_unread(self) -> None:
        self._is_attended = True


class _PagedArray(ReadArray):
    """Numbers of a read, which attention can read from its pages.

    Attributes:
        read: the read.
        tiles: how often the heads of the pages follow each other in this array.
    """

    read: PagedRead
    tiles = 1

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
        if isinstance(indices, TokenIndices) and self._has_tokens_at(indices, axis):
            tokens = self.read.gather_tokens(indices.tokens, of_values=self.holds_values)
            if tokens is not None:
                return tokens
        keys, values = self.read.gather()
        gathered = self.like_this(values if self.holds_values else keys)
        return mx.take_along_axis(gathered, indices, axis)

    def _has_tokens_at(self, indices: TokenIndices, axis: int | None) -> bool:
        """Whether these are indices of tokens of the pages."""
        batch, _, _, dim = self.shape
        is_whole = indices.shape[:2] == (batch, 1) and indices.shape[3] == dim
        return is_whole and axis in (2, -2) and self.is_as_held and not indices.is_changed

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


def gathered_arrays(read: PagedRead) -> tuple[PagedKeys, PagedValues]:
    """Keys and values that stand for the pages of a read, and are gathered when computed."""
    gathered = GatheredRead(read)
    keys, values = PagedKeys(gathered.gathered[0]), PagedValues(gathered.gathered[1])
    keys.read = values.read = gathered
    # These live as long as the read, and so as any array that was made of the keys or values.
    read.pages.lazy_reads.watch(gathered.gathered, read.group_step.metadata)
    return keys, values
