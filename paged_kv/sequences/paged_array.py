"""Arrays that stand for pages.

mlx-lm's models take what a cache returns for arrays and pass it on to attention. These are arrays
that say which pages they stand for, so that attention can read the pages instead. For layers of
which only attention takes keys and values, nothing else is made: the arrays have a shape and a
dtype, and computing one raises an error. For others they are keys and values that are gathered
when they are computed.
"""

from __future__ import annotations

from threading import RLock, current_thread
from typing import Any, Protocol

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import Tail
from paged_kv.kernels.pages.errors import PagesNotRead
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.pool.page_pool import PagePool
from paged_kv.sequences.step_view import StepView


class ReadStep(Protocol):
    """The latest step among the tokens of a read: see `Step`."""

    pool: PagePool
    lock: RLock
    is_open: bool
    unread: PagedRead | None


class PagedRead:
    """All keys and values of one layer at one step, as pages.

    Args:
        step: the latest one in them.
        view: what it sees in the layer's group.
        pages: the layer's pages.
        tail: the step's keys and values, if no page holds them until they were attended to.

    Attributes:
        lock: keeps pages from being moved while it is held.
    """

    __slots__ = ("lock", "pages", "step", "tail", "view")

    def __init__(
        self, step: ReadStep, view: StepView, pages: LayerPages, tail: Tail | None
    ) -> None:
        self.step = step
        self.view = view
        self.pages = pages
        self.lock = step.lock
        self.tail = tail

    def attend(
        self,
        queries: mx.array,
        mask: mx.array | str | None,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        """Attention of a step of queries [B, q_heads, S, k_dim]; see `Backend.attend`. None if a
        kernel that knows only lengths and a window does not hide what the mask hides, or if the
        sequences have changed since: the step then holds other tokens."""
        with self.lock:
            view, step = self.view, self.step
            is_same_mask = mask is view.mask and queries.shape[2] == view.queries
            if not step.is_open or not (is_same_mask or view.sees_as(mask, queries.shape[2])):
                return None
            if view.moves != view.group.moves:
                view.follow_moves()
            step.unread = None
            return self.pages.attend(
                queries,
                view.attention_metadata,
                scale=scale,
                causal=view.causal,
                window=view.window,
                sinks=sinks,
                tail=self.tail,
            )

    def gather(self) -> tuple[mx.array, mx.array]:
        """The keys and values themselves, lazily.

        Raises:
            PagesNotRead: the sequences have changed since, so the pages may hold others.
        """
        with self.lock:
            if not self.step.is_open:
                raise PagesNotRead(self.step.pool.name)
            self.step.unread = None
            self.view.follow_moves()
            self.step.pool.note_gather(self.view.group, self.pages)
            gathered = self.pages.gather(self.view.attention_metadata, self.tail)
            self.pages.lazy_reads.leave(gathered, self.view.attention_metadata, current_thread())
            return gathered


class GatheredRead(PagedRead):
    """A read of which the keys and values are there as well, as lazily gathered arrays."""

    __slots__ = ("_is_attended", "_thread", "gathered")

    def __init__(self, read: PagedRead) -> None:
        super().__init__(read.step, read.view, read.pages, read.tail)
        self._is_attended = True  # nothing to leave behind if it cannot be gathered
        self._thread = current_thread()
        self.gathered = read.pages.gather(read.view.attention_metadata, read.tail)
        self._is_attended = False

    def __del__(self) -> None:
        if not self._is_attended:
            # A graph may still hold the gathered arrays, and be computed later.
            self.pages.lazy_reads.leave(self.gathered, self.view.attention_metadata, self._thread)
            self.step.pool.note_gather(self.view.group, self.pages)

    def attend(self, queries: mx.array, mask: Any, **options: Any) -> mx.array | None:
        output = super().attend(queries, mask, **options)
        self._is_attended |= output is not None
        return output

    def gather(self) -> tuple[mx.array, mx.array]:
        return self.gathered


class PagedKeys(mx.array):
    """Keys [B, k_heads, T, k_dim] of all tokens so far."""

    read: PagedRead


class PagedValues(mx.array):
    """Values [B, v_heads, T, v_dim] of all tokens so far."""

    read: PagedRead


def gathered_arrays(read: PagedRead) -> tuple[PagedKeys, PagedValues]:
    """Keys and values that stand for the pages of a read, and are gathered when looked at."""
    gathered = GatheredRead(read)
    keys, values = PagedKeys(gathered.gathered[0]), PagedValues(gathered.gathered[1])
    keys.read = values.read = gathered
    read.pages.lazy_reads.watch((keys, values), read.view.attention_metadata)
    return keys, values
