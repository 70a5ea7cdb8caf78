"""Reads the pages of a step, as attention asks for them, and defines arrays that stand for a read.

mlx-lm's models pass the arrays that a cache returns to attention. Those of this file name their
pages, so that attention can read the pages instead. In layers where only attention uses keys and
values, they have just a shape and a dtype, and computing one raises an error. In other layers, MLX
gathers the keys and values when it computes the arrays.

Models also assign `cache.keys = mx.depends(cache.keys, x)`, so that whoever computes the cache also
computes x: a message to another rank, or keys that no output of this step needs. Pages are no part
of the graph. So the cache keeps a number that depends on x, and nobody gathers the keys for it.
Some models assign other arrays, only to bound the graph. What other code assigns would be new
contents, which pages do not get so: it is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from threading import current_thread
from typing import Any

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import Attention, Unwritten
from paged_kv.kernels.pages.choice import chooses
from paged_kv.kernels.pages.errors import PagesNotRead
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.steps.metadata import visible
from paged_kv.steps.recognised_arrays import (
    GroupedArray,
    PositionKeys,
    ReadArray,
    TokenIndices,
    TransposedKeys,
)
from paged_kv.steps.step import GroupStep, Seen, Step


class PagedRead:
    """All keys and values of one layer at one step, as pages.

    Attributes:
        group_step: the part of the step in the layer's group.
        step_tokens: the step's keys and values, if `group_step.needs_step`.
        unwritten: those of them that no page holds.
    """

    __slots__ = ("group_step", "pages", "step", "step_tokens", "unwritten")

    def __init__(
        self, step: Step, group_step: GroupStep, pages: LayerPages, step_tokens: Unwritten | None
    ) -> None:
        self.step = step
        self.group_step = group_step
        self.pages = pages
        self.step_tokens = step_tokens
        self.unwritten = step_tokens if group_step.read_first else None

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
        """Attention of a step of queries [B, q_heads, S, k_dim]; see `Backend.attend`. None if
        lengths and a window cannot express the mask, or if the sequences have changed since: the
        step then holds other tokens. An error undoes the step in all layers."""
        step = self.step
        with step.pool.lock, step:
            group_step, pages, count = self.group_step, self.pages, queries.shape[2]
            seen = group_step.seen
            if seen.mask is not mask or seen.queries != count:
                found = None
                if mask is not None or not group_step.parts:
                    found = visible(mask, count, group_step.metadata, group_step.group.window)
                seen = group_step.seen = Seen(mask, count, found)
            visibility = seen.visibility
            if visibility is None or not step.is_open:
                return None
            if group_step.moves != group_step.group.moves:
                group_step.locate()
            step.is_unread = False
            metadata = group_step.metadata
            causal, window, wider_window = visibility
            key = scale, causal, window, id(sinks), softcap
            attention = pages.attentions.get(key) or pages.attention(*key[:3], sinks, softcap)
            if position_queries is None and not group_step.parts and wider_window is None:
                if pages.read_tokens is not None and chooses(attention, metadata, count):
                    group_step.count_choice(step.pool, pages.read_tokens)
                return pages.attend(queries, metadata, attention, self.unwritten)
            wider = None
            if wider_window is not None:
                wider = pages.attention(scale, causal, wider_window, sinks, softcap)
            return self._attend_apart(queries, position_queries, attention, wider)

    def _attend_apart(
        self,
        queries: mx.array,
        position_queries: mx.array | None,
        attention: Attention,
        wider: Attention | None,
    ) -> mx.array:
        """Attention to latents, in parts of the step, or by queries that see different windows."""
        step, unwritten, attend = self.group_step, self.unwritten, self.pages.attend
        if step.parts and self.step_tokens is not None:
            keys, values = self.step_tokens
            outputs = []
            # Write the parts once more, so that each finds its own page in 16 bits: a part is
            # written in the block of the one before.
            for at, metadata, resumed, _ in step.parts:
                self.pages.copy(resumed)
                self.pages.write_later(keys[:, :, at], values[:, :, at], metadata)
                positions = None if position_queries is None else position_queries[:, :, at]
                found = attend(queries[:, :, at], metadata, attention, unwritten, positions)
                outputs.append(found)
            return mx.concatenate(outputs, axis=2)
        output = attend(queries, step.metadata, attention, unwritten, position_queries)
        if wider is None:
            return output
        # The token that only the first query's wider window reaches is not held any more.
        others = attend(queries, step.metadata, wider, unwritten, position_queries)
        return mx.concatenate([output[:, :, :1], others[:, :, 1:]], axis=2)

    def gather_from_pages(self) -> tuple[mx.array, mx.array]:
        """As `gather`: the step's own as they were given, if it has parts, so that nothing is
        quantised that a query's own page holds."""
        return self.pages.gather(self.group_step.metadata, self.step_tokens)

    def gather(self) -> tuple[mx.array, mx.array]:
        """Gather the keys and values, lazily.

        Raises:
            PagesNotRead: the sequences have changed since, so the pages may hold other tokens.
        """
        step, group_step = self.step, self.group_step
        with step.pool.lock:
            if not step.is_open:
                # Not as an error of the step, whose tokens may be in use.
                raise PagesNotRead(step.pool.name)
            with step:
                step.is_unread = False
                group_step.follow_moves()
                step.pool.record_gather(group_step.group, self.pages)
                gathered = self.gather_from_pages()
                self.pages.lazy_reads.leave(gathered, group_step.metadata, current_thread())
                return gathered

    def gather_tokens(self, indices: mx.array, *, of_values: bool) -> mx.array | None:
        """Gather the keys, or the values, of all heads at indices [B, K] of what `gather` returns,
        lazily. None if there is a window, if the step is in no page yet, or if the sequences have
        changed since."""
        step, group_step = self.step, self.group_step
        with step.pool.lock, step:
            is_in_pages = group_step.group.window is None and not group_step.needs_step
            if not (step.is_open and is_in_pages):
                return None
            step.is_unread = False
            group_step.follow_moves()
            keys, values = self.pages.gather_tokens(group_step.metadata, indices)
            tokens = values if of_values else keys
            self.pages.lazy_reads.leave((tokens,), group_step.metadata, current_thread())
            return tokens

    def leave_unread(self) -> None:
        """Record that no graph holds what was gathered for this read."""


class GatheredRead(PagedRead):
    """A read that also has its keys and values as lazily gathered arrays. With `counted`, a gather
    counts as a fallback of attention; not if code looks at keys and values itself."""

    __slots__ = ("_is_attended", "_thread", "counted", "gathered")

    def __init__(self, read: PagedRead, *, counted: bool = True) -> None:
        super().__init__(read.step, read.group_step, read.pages, read.step_tokens)
        self._is_attended = True  # for `__del__`, if `gather` raises
        self._thread = current_thread()
        self.counted = counted
        self.gathered = read.gather_from_pages()
        self._is_attended = False

    def __del__(self) -> None:
        if not self._is_attended:
            # A graph may still hold the gathered arrays, and be computed later.
            self.pages.lazy_reads.leave(self.gathered, self.group_step.metadata, self._thread)
            if self.counted:
                self.step.pool.record_gather(self.group_step.group, self.pages)

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
    """Numbers of a read, which attention can read from its pages. The heads of the pages follow
    each other `tiles` times."""

    read: PagedRead
    tiles = 1

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(self.read, GatheredRead) and not self.read.counted:
            raise _contents_refused()
        super().__setitem__(index, value)

    def swapaxes(self, axis1: int, axis2: int, **options: Any) -> mx.array:
        swapped: mx.array = super().swapaxes(axis1, axis2, **options)
        if self.is_changed or {axis1 % 4, axis2 % 4} != {2, 3}:
            return swapped
        if self.holds_values:
            return swapped if self.tiles > 1 else PositionKeys.of(swapped, self.read)
        return TransposedKeys.of(swapped, self.read) if self.is_as_held else swapped

    def astype(self, dtype: mx.Dtype, stream: Any = None) -> mx.array:
        """Still stands for its read if the dtype holds the same numbers."""
        cast = super().astype(dtype, stream)
        return self._followed_by(cast, 1) if dtype in (self.dtype, mx.float32) else cast

    def tiled(self, result: mx.array, repetitions: Any) -> mx.array:
        """`result`, which is mx.tile(self, repetitions); still stands for its read if only heads
        were repeated."""
        if not isinstance(repetitions, list | tuple) or len(repetitions) != 4:
            return result
        tokens_stay = (repetitions[0], *repetitions[2:]) == (1, 1, 1)
        return self._followed_by(result, repetitions[1]) if tokens_stay else result

    def grouped(self, result: mx.array, axis: Any) -> mx.array:
        """`result`, which is mx.expand_dims(self, axis); still stands for its read if the axis is
        that of grouped queries."""
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


class PagedValues(_PagedArray):
    """Values [B, v_heads, T, v_dim] of all tokens so far; position keys where attention is
    latent."""

    holds_values = True


def gathered_arrays(read: PagedRead, *, counted: bool = True) -> tuple[PagedKeys, PagedValues]:
    """Keys and values that are gathered when computed; see `GatheredRead`."""
    gathered = GatheredRead(read, counted=counted)
    keys, values = PagedKeys(gathered.gathered[0]), PagedValues(gathered.gathered[1])
    keys.read = values.read = gathered
    # These live as long as the read, and so as any array that was made of the keys or values.
    read.pages.lazy_reads.watch(gathered.gathered, read.group_step.metadata)
    return keys, values


class _Thread(threading.local):
    """`in_model`: whether this thread is within a call of a model."""

    in_model = False


this_thread = _Thread()


class DependentArray(ReadArray):
    """Keys or values of a cache, made to depend on other arrays. Gathered when computed."""

    read: PagedRead
    dependencies: tuple[mx.array, ...]


def depending(
    array: PagedKeys | PagedValues | DependentArray, dependencies: Iterable[mx.array]
) -> DependentArray:
    added = tuple(dependencies)
    result = DependentArray(mx.depends(mx.array(array), list(added)))
    earlier = array.dependencies if isinstance(array, DependentArray) else ()
    result.read, result.dependencies = array.read, (*earlier, *added)
    return result


def dependencies_of(assigned: mx.array, *, is_checked: bool) -> tuple[mx.array, ...]:
    """What an assigned array depends on, except its pages.

    Raises:
        ValueError: it is checked, and would be new contents.
    """
    if isinstance(assigned, DependentArray) and not assigned.is_changed:
        assigned.read.leave_unread()
        return assigned.dependencies
    if is_checked and not this_thread.in_model:
        raise _contents_refused()
    return (assigned,)


def joined(dependencies: Iterable[mx.array | None]) -> mx.array | None:
    """A number that depends on all these arrays; None if there is none. Once computed it holds none
    of them, so that MLX can write to their memory."""
    found = [each for each in dependencies if each is not None]
    number: mx.array | None = mx.depends(mx.array(0), found) if found else None
    return number


def _contents_refused() -> ValueError:
    """The error of new contents for a cache that are assigned, and not written."""
    return ValueError(
        "keys and values of a paged cache are in its pages, and assigned numbers do not go there: "
        "write them with update_and_fetch(keys, values), to a cache of make_cache() if they "
        "replace others, and remove tokens with trim(n)"
    )
