"""Reads the pages of a step, as attention asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from threading import current_thread
from typing import Any

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata, Unwritten
from paged_kv.kernels.pages.choice import chooses
from paged_kv.kernels.pages.errors import PagesNotRead
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.steps.masks import visible
from paged_kv.steps.step import GroupStep, Seen, Step


class PagedRead:
    """All keys and values of one layer at one step, as pages.

    Args:
        step: the latest step.
        group_step: its part in the layer's group.
        pages: the layer's pages.
        step_tokens: the step's keys and values, if `group_step.needs_step`.

    Attributes:
        unwritten: those of them that no page holds.
    """

    __slots__ = ("group_step", "pages", "step", "step_tokens", "unwritten")

    def __init__(
        self,
        step: Step,
        group_step: GroupStep,
        pages: LayerPages,
        step_tokens: Unwritten | None,
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
    """A read that also has its keys and values as lazily gathered arrays.

    Args:
        read: the read.
        counted: whether a gather counts as a fallback of attention; not if code looks at keys and
            values itself.
    """

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
