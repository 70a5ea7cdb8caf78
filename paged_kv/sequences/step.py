"""Plans a step, the next tokens of some sequences, once for all their layers.

Layers write one after the other, and the plan is the same for each: the tokens of each sequence,
their blocks, and the visible tokens. So the first layer that writes, or the model's request for a
mask, begins a step, and the other layers find it through their sequences. The step records the
progress of each layer, and reports it when a sequence is queried. Any other change to one of the
sequences closes the step.
"""

from __future__ import annotations

from collections.abc import Set
from functools import cached_property
from weakref import ref

import mlx.core as mx

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, NewTokens
from paged_kv.kernels.pages.errors import PagesNotRead, ThreadConflict
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.pool.page_pool import PagePool
from paged_kv.sequences.out_of_window_pages import is_read_first, keep_unseen
from paged_kv.sequences.paged_array import PagedKeys, PagedRead, PagedValues, gathered_arrays
from paged_kv.sequences.pending_step import PendingStep
from paged_kv.sequences.sequence import Sequence
from paged_kv.sequences.step_blocks import Scratch, drop, reserve
from paged_kv.sequences.step_metadata import StepPart
from paged_kv.sequences.step_row import StepRow
from paged_kv.sequences.step_view import StepView


class Step:
    """S tokens of some sequences. `begin_step` makes steps, and `read` for tokens already written.

    Args:
        pool: the sequences' pool.
        rows: the step in each sequence.
        count: S, padding included.
        layers: the layers that take the step; all have the same tokens.

    Attributes:
        sequences: the sequence of each row.
        shape: numbers of sequences and of tokens.
        waiting: the layers that have not taken the step yet.
        is_open: whether the sequences have not changed otherwise.
        attending: in a model's step, the layers whose arrays only attention can read.
        untold: layers that have taken the step since the last `tell`.
        unread: the latest layer's keys and values, until attention has read them.
    """

    def __init__(self, pool: PagePool, rows: list[StepRow], count: int, layers: Set[int]) -> None:
        self.pool = pool
        self.lock = pool.lock
        self.rows = rows
        self.sequences = [row.sequence for row in rows]
        self.shape = (len(rows), count)
        self.layers = layers
        self.waiting: set[int] = set(layers) if count else set()
        self.is_open = True
        self._reserved_groups = 0
        self.attending: frozenset[int] = frozenset()
        self.unread: PagedRead | None = None
        self.untold: list[int] = []
        self._views: dict[int, StepView] = {}
        self._scratch: Scratch = {}
        me = ref(self)
        for sequence in self.sequences:
            sequence.close_step()
            sequence.step = me

    def __del__(self) -> None:
        self.tell()
        drop(self._scratch)

    @cached_property
    def offset_before(self) -> int | mx.array:
        """The position of the first token: a number for one sequence, int32 [B] for a batch."""
        return _offsets([row.offset for row in self.rows])

    @cached_property
    def offset_after(self) -> int | mx.array:
        """The position after the last token."""
        return _offsets([row.offset_after for row in self.rows])

    @property
    def is_complete(self) -> bool:
        """Whether all layers of the pool have taken the step."""
        return not self.waiting and len(self.layers) == self.pool.num_layers

    def begin_in_model(self) -> None:
        """Note that a model takes the step, and reserve blocks for it.

        Raises:
            PoolExhausted: the budget does not hold them; nothing was changed.
        """
        self._reserve()
        pool, is_decode = self.pool, self.shape[1] == 1
        self.attending = pool.attending_in_decode if is_decode else pool.attending

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedValues]:
        """Take the step in one layer; see `append`."""
        with self.lock:
            try:
                if self.unread is not None:
                    raise PagesNotRead(self.pool.name)
                view = self._views.get(layer)
                pages = None if view is None else view.group.pages.get(layer)
                if view is None or pages is None:
                    view, pages = self._prepare(layer, LayerGeometry.of(keys, values))
                given = keys.shape, values.shape, keys.dtype, values.dtype
                expected = view.expected.get(id(pages.geometry))
                if expected is None or expected.given != given:
                    expected = view.expect(layer, keys, values)
                if view.moves != view.group.moves:
                    view.follow_moves()
                if view.read_first:
                    keep_pending(layer, self.sequences, (keys, values), view.attention_metadata)
                elif view.parts:
                    write_parts(pages, view.parts, (keys, values))
                else:
                    pages.defer(keys, values, view.attention_metadata)
                self.waiting.discard(layer)
                self.untold.append(layer)
                read = PagedRead(self, view, pages, (keys, values) if view.needs_step else None)
                if layer not in self.attending:
                    return gathered_arrays(read)
            except (PoolExhausted, ValueError, ThreadConflict, PagesNotRead):
                self._undo()
                raise
            if self.pool.attends_in_order:
                self.unread = read
            paged_keys, paged_values = PagedKeys(expected.keys), PagedValues(expected.values)
            paged_keys.read = paged_values.read = read
            return paged_keys, paged_values

    def read(self, layer: int) -> PagedRead:
        """A read of all tokens so far, in a layer that has taken the step."""
        group, new_tokens = self.pool.group_of(layer), unwritten_step(layer, self.sequences)
        view = self._views.get(layer)
        if view is None:
            view = self._views[layer] = StepView(
                group, self.rows, read_first=new_tokens is not None
            )
        view.follow_moves()
        return PagedRead(self, view, group.pages[layer], new_tokens)

    def tell(self) -> None:
        """Report the layers' progress to the sequences. The garbage collector may call this at any
        time, so it takes no lock and touches nothing but the sequences."""
        layers, self.untold = self.untold, []
        if layers:
            for row in self.rows:
                row.sequence.advance(layers, row.before, row.end, row.padding)

    def close(self) -> None:
        """End the step, because a sequence changes in another way."""
        self.tell()
        self.is_open, self.unread = False, None
        drop(self._scratch)
        for sequence in self.sequences:
            sequence.leave_step(self)

    def _prepare(self, layer: int, geometry: LayerGeometry) -> tuple[StepView, LayerPages]:
        """Prepare everything that writes need, so that they cannot fail. Called for the first layer
        of the step, and for layers that were never written."""
        pool, count = self.pool, self.shape[1]
        begun = [row for row in self.rows if row.sequence.begin_write(row.offset + count)]
        group = pool.group_of(layer)
        pages = group.open_layer(layer, geometry)
        if any(row.sequence.length for row in begun):
            for each in pool.groups:
                each.settle()
        self._reserve()
        for row in begun:
            keep_unseen(pool.reclaimer, pool.groups, row.sequence, row.end)
        for each in pool.groups:
            if each.is_open:
                read_first = is_read_first(each.window, self.rows, count)
                scratch = self._scratch.get(each)
                view = StepView(
                    each, self.rows, read_first=read_first, count=count, scratch=scratch
                )
                self._views.update(dict.fromkeys(each.layers, view))
        return self._views[layer], pages

    def _reserve(self) -> None:
        """Reserve blocks in all open groups. The block size of other groups is unknown until their
        first write."""
        groups = sum(group.is_open for group in self.pool.groups)
        if groups != self._reserved_groups:
            for sequence in self.sequences:
                if sequence.pending:
                    sequence.write_pending(self.waiting)
            self._scratch.update(reserve(self.pool, self.rows))
            self._reserved_groups = groups

    def _undo(self) -> None:
        self.close()
        for sequence in self.sequences:
            sequence.undo_step()


def _offsets(offsets: list[int]) -> int | mx.array:
    return offsets[0] if len(offsets) == 1 else mx.array(offsets, dtype=mx.int32)


def write_parts(pages: LayerPages, parts: list[StepPart], step: NewTokens) -> None:
    """Write a step to the pages of a layer, and recode the pages that it fills and leaves."""
    keys, values = step
    for tokens, metadata, resumed, recoded in parts:
        pages.copy(resumed)
        pages.write(keys[:, :, tokens], values[:, :, tokens], metadata)
        pages.copy(recoded)


def keep_pending(
    layer: int, sequences: list[Sequence], step: NewTokens, metadata: AttentionMetadata
) -> None:
    """Keep the step of one layer at its sequences until it is written; `metadata` tells valid
    tokens from padding."""
    owned = metadata.valid_tokens(step[0].shape[2])
    for row, (sequence, own) in enumerate(zip(sequences, owned, strict=True)):
        pending = sequence.pending[layer] = PendingStep(step, row, own)
        sequence.pool.pending.add(pending)


def unwritten_step(layer: int, sequences: list[Sequence]) -> NewTokens | None:
    """The step that is pending in exactly these sequences; None if there is none, or if the batch
    was rearranged since."""
    pending = [sequence.pending.get(layer) for sequence in sequences]
    first = pending[0] if pending else None
    if first is not None and all(
        each is not None and each.step is first.step and each.row == row
        for row, each in enumerate(pending)
    ):
        return first.step
    return None
