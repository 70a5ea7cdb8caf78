"""Reads the pages of a step: what it holds in a group of layers, and what attention asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from threading import current_thread
from typing import Any, NamedTuple

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata, Unwritten
from paged_kv.kernels.pages.choice import chooses, tokens_read
from paged_kv.kernels.pages.errors import PagesNotRead
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import LayerGeometry
from paged_kv.kernels.pages.placeholder import placeholder
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.masks import Visibility, visible
from paged_kv.steps.metadata import StepPart, attention_metadata, step_parts
from paged_kv.steps.step_row import StepRow, undo_step
from paged_kv.steps.transaction import Scratch, Transaction


class StandIns(NamedTuple):
    """Arrays with the shapes of all keys and values of a layer, which cannot be computed, and the
    shapes and dtypes of the step's own that they were made for."""

    given: tuple[Any, ...]
    keys: mx.array
    values: mx.array


class _Seen(NamedTuple):
    """What the queries of a step see by a mask, see `visible`."""

    mask: object
    queries: int
    visibility: Visibility | None


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
        stand_ins: of layers, by the id of their geometry object, which layers share.
        has_noted_choice: whether the tokens that it chose were counted.
        seen: what the latest mask lets the queries see: layers usually get the same one.
    """

    metadata: AttentionMetadata
    needs_step: bool

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
        self.transaction = transaction
        self.parts: list[StepPart] = []
        self.stand_ins: dict[int, StandIns] = {}
        self.seen = _Seen(None, 0, None)
        self.has_noted_choice = False
        self._count = count
        self._rows = rows
        self.locate()

    def locate(self) -> None:
        """Find where the tokens are; again, if pages have moved."""
        group, rows = self.group, self._rows
        self.moves = group.moves
        self.metadata = attention_metadata(group, rows, read_first=self.read_first)
        if self._count > 1 and group.window is None:
            scratch = self.transaction.scratch or Scratch()
            self.parts = step_parts(group, rows, self._count, scratch.get(group, {}))
        self.needs_step = self.read_first or bool(self.parts)

    def follow_moves(self) -> None:
        """Find where the tokens are if pages have moved; what each layer does asks by itself."""
        if self.moves != self.group.moves:
            self.locate()

    def stand_ins_for(self, layer: int, keys: mx.array, values: mx.array) -> StandIns:
        """Stand-ins for a layer that gets these keys and values; layers of its geometry share them.

        Raises:
            ValueError: they do not fit the layer.
        """
        geometry = self.group.pages[layer].geometry
        if not geometry.fits(keys, values):
            self.group.open_layer(layer, LayerGeometry.of(keys, values))
        batch, length = keys.shape[0], max(self.metadata.ends, default=0)
        all_keys = placeholder((batch, geometry.k_heads, length, geometry.k_dim), geometry.k_dtype)
        all_values = all_keys
        if not geometry.is_alike:
            shape = (batch, geometry.v_heads, length, geometry.v_dim)
            all_values = placeholder(shape, geometry.v_dtype)
        given = keys.shape, values.shape, keys.dtype, values.dtype
        found = self.stand_ins[id(geometry)] = StandIns(given, all_keys, all_values)
        return found

    def note_choice(self, read_tokens: int) -> None:
        """Count the tokens that a step which chooses reads and leaves out, once for all layers."""
        if self.has_noted_choice:
            return
        self.has_noted_choice = True
        for length in self.metadata.context_lens:
            read = tokens_read(length, read_tokens)
            if read < length:
                self.pool.counts.tokens_chosen += read
                self.pool.counts.tokens_left_out += length - read

    def undo(self) -> None:
        """Let the sequences be as they were before the step, which has failed in this group, unless
        they have changed in another way since."""
        self.forget_unwritten()
        undo_step(self._rows, self.transaction)

    def forget_unwritten(self) -> None:
        """Do not write what layers have not written yet, which was undone."""
        for pages in self.group.pages.values():
            pages.forget_unwritten(self.metadata)


class PagedRead:
    """All keys and values of one layer at one step, as pages.

    Args:
        group_step: the latest step, in the layer's group.
        pages: the layer's pages.
        step_tokens: the step's keys and values, if `group_step.needs_step`.

    Attributes:
        unwritten: those of them that no page holds.
        lock: held during reads, so that no page moves.
    """

    __slots__ = ("group_step", "lock", "pages", "step_tokens", "unwritten")

    def __init__(
        self, group_step: GroupStep, pages: LayerPages, step_tokens: Unwritten | None
    ) -> None:
        self.group_step = group_step
        self.pages = pages
        self.lock = group_step.pool.lock
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
        with self.lock:
            try:
                step, pages, count = self.group_step, self.pages, queries.shape[2]
                seen = step.seen
                if seen.mask is not mask or seen.queries != count:
                    found = None
                    if mask is not None or not step.parts:
                        found = visible(mask, count, step.metadata, step.group.window)
                    seen = step.seen = _Seen(mask, count, found)
                visibility = seen.visibility
                if visibility is None or not step.transaction.is_open:
                    return None
                if step.moves != step.group.moves:
                    step.locate()
                step.transaction.is_unread = False
                causal, window, wider_window = visibility
                key = scale, causal, window, id(sinks), softcap
                attention = pages.attentions.get(key) or pages.attention(*key[:3], sinks, softcap)
                if position_queries is None and not step.parts and wider_window is None:
                    if pages.read_tokens is not None and chooses(attention, step.metadata, count):
                        step.note_choice(pages.read_tokens)
                    return pages.attend(queries, step.metadata, attention, self.unwritten)
                wider = None
                if wider_window is not None:
                    wider = pages.attention(scale, causal, wider_window, sinks, softcap)
                return self._attend_apart(queries, position_queries, attention, wider)
            except BaseException:
                self.group_step.undo()
                raise

    def _attend_apart(
        self,
        queries: mx.array,
        position_queries: mx.array | None,
        attention: Attention,
        wider: Attention | None,
    ) -> mx.array:
        """Attention to latents, in parts of the step, or by queries that see different windows."""
        step, unwritten = self.group_step, self.unwritten
        attend = self.pages.attend
        if step.parts and self.step_tokens is not None:
            outputs = [
                attend(
                    queries[:, :, at],
                    metadata,
                    attention,
                    unwritten,
                    None if position_queries is None else position_queries[:, :, at],
                )
                for at, metadata in self._rewrite(*self.step_tokens)
            ]
            return mx.concatenate(outputs, axis=2)
        output = attend(queries, step.metadata, attention, unwritten, position_queries)
        if wider is None:
            return output
        # The token that only the first query's wider window reaches is not held any more.
        others = attend(queries, step.metadata, wider, unwritten, position_queries)
        return mx.concatenate([output[:, :, :1], others[:, :, 1:]], axis=2)

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
            self.pages.write_later(keys[:, :, tokens], values[:, :, tokens], metadata)
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
            group_step.pool.record_gather(group_step.group, self.pages)
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
        self.group_step.pool.record_gather(self.group_step.group, self.pages)

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


class UncountedRead(GatheredRead):
    """A read that no attention needs, of code that looks at keys and values itself. That they are
    gathered is no fallback."""

    __slots__ = ()

    def note_gather(self) -> None:
        pass
