"""Writes and reads a step: the next tokens of some sequences, in all their layers.

Layers write one after the other, and the plan is the same for each: the tokens of each sequence,
their blocks, and the visible tokens. So the first layer that writes, or the model's request for a
mask, begins a step, and the other layers take the same one from their `Batch`. Any other change to
one of the sequences closes the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import cached_property
from itertools import count as numbers

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, Unwritten
from paged_kv.kernels.pages.errors import PagesNotRead
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import LayerGeometry
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.arrays import PagedKeys, PagedValues, gathered_arrays
from paged_kv.steps.blocks import reserve
from paged_kv.steps.metadata import StepPart
from paged_kv.steps.out_of_window_pages import is_read_first, reserve_skipped
from paged_kv.steps.progress import Progress
from paged_kv.steps.read import GroupStep, PagedRead
from paged_kv.steps.sequence import Sequence
from paged_kv.steps.step_row import StepRow, offset_of, undo_step
from paged_kv.steps.transaction import Transaction
from paged_kv.steps.unwritten import UnwrittenStep

step_numbers = numbers()
"""The numbers of steps, in the order in which they begin."""


class Step:
    """S tokens of some sequences. `Batch` makes steps.

    Args:
        pool: the sequences' pool.
        rows: the step in each sequence.
        count: S, padding included; 0 to read the tokens that were written.
        layers: the layers that take the step; all have the same tokens.

    Attributes:
        number: of `step_numbers`.
        shape: numbers of sequences and of tokens.
        waiting: the layers that have not taken the step yet.
        transaction: whether the step still holds.
        attending: in a model's step, the layers whose arrays only attention can read.
    """

    def __init__(self, pool: PagePool, rows: list[StepRow], count: int, layers: Set[int]) -> None:
        self.number = next(step_numbers)
        self.pool = pool
        self.lock = pool.lock
        self.rows = rows
        self.shape = (len(rows), count)
        self.layers = layers
        self.waiting: set[int] = set(layers) if count else set()
        self.transaction = Transaction()
        self.attending: frozenset[int] = frozenset()
        self._reserved_groups = 0
        self._groups: dict[int, GroupStep] = {}
        # Where each sequence notes the layers that have taken the step, and what it notes.
        self._notes: list[tuple[dict[int, Progress], Progress]] = []
        self._keeps_skipped = False
        for sequence, before, end, padding, _ in rows:
            taken = sequence.begin_step(self.transaction, grows=end > before)
            self._notes.append((taken, Progress(end, end - before, padding)))
            self._keeps_skipped |= sequence.caches_out_of_window

    @cached_property
    def offset_before(self) -> int | mx.array:
        """The position of the first token: a number for one sequence, int32 [B] for a batch."""
        rows = self.rows
        return rows[0].offset if len(rows) == 1 else offset_of([row.offset for row in rows])

    @cached_property
    def offset_after(self) -> int | mx.array:
        """The position after the last token."""
        return offset_of([progress.offset for _, progress in self._notes])

    def begin_in_model(self) -> None:
        """Note that a model takes the step, and reserve blocks for it.

        Raises:
            PoolExhausted: the budget does not hold them; nothing was changed.
        """
        try:
            self.group_steps()
        except BaseException:
            self.undo()
            raise
        pool, is_decode = self.pool, self.shape[1] == 1
        self.attending = pool.attending_in_decode if is_decode else pool.attending

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedValues]:
        """Take the step in one layer; see `Batch.append`."""
        with self.lock:
            try:
                if self.transaction.is_unread:
                    raise PagesNotRead(self.pool.name)
                step = self._groups.get(layer)
                pages = None if step is None else step.group.pages.get(layer)
                if step is None or pages is None:
                    step, pages = self._prepare(layer, keys, values)
                if self._keeps_skipped:
                    self._reserve_skipped()
                arrays = step.stand_ins.get(id(pages.geometry))
                given = keys.shape, values.shape, keys.dtype, values.dtype
                if arrays is None or arrays.given != given:
                    arrays = step.stand_ins_for(layer, keys, values)
                if step.moves != step.group.moves:
                    step.locate()
                # Before the write: one that fails may have overwritten a ring's tokens.
                self.waiting.discard(layer)
                for taken, progress in self._notes:
                    taken[layer] = progress
                if step.read_first:
                    keep_unwritten(layer, self.rows, (keys, values), step.metadata)
                elif step.parts:
                    write_parts(pages, step.parts, (keys, values))
                else:
                    pages.write_later(keys, values, step.metadata)
                read = PagedRead(step, pages, (keys, values) if step.needs_step else None)
                if layer not in self.attending:
                    return gathered_arrays(read)
            except BaseException:
                self.undo()
                raise
            self.transaction.is_unread = self.pool.attends_in_order
            paged_keys, paged_values = PagedKeys(arrays.keys), PagedValues(arrays.values)
            paged_keys.read = paged_values.read = read
            return paged_keys, paged_values

    def undo(self) -> None:
        """Let the sequences be as they were before the step, which has failed in some layer, unless
        they have changed in another way since."""
        with self.lock:
            for step in set(self._groups.values()):
                step.forget_unwritten()
            undo_step(self.rows, self.transaction)

    def read(self, layer: int, unwritten: Unwritten | None) -> PagedRead:
        """A read of all tokens so far, in a layer that has taken the step; `unwritten` are those
        that no page holds."""
        step = self._groups.get(layer)
        if step is None:
            group = self.pool.group_of(layer)
            read_first = unwritten is not None
            step = GroupStep(self.pool, group, self.rows, self.transaction, read_first=read_first)
            self._groups[layer] = step
        step.follow_moves()
        return PagedRead(step, step.group.pages[layer], unwritten)

    def group_steps(self) -> dict[int, GroupStep]:
        """The step in each layer's group, for groups that are open, with all blocks that it needs.

        The block size of other groups is unknown until their first write.

        Raises:
            PoolExhausted: the budget does not hold the step's blocks.
        """
        pool, steps, count = self.pool, self._groups, self.shape[1]
        opened = 0
        for group in pool.groups:
            if not steps and not group.knows_all_layers and self._has_tokens():
                group.record_second_step()
            opened += group.is_open
        if opened != self._reserved_groups:
            for row in self.rows:
                if row.sequence.unwritten:
                    row.sequence.write_unwritten(self.waiting)
            self.transaction.scratch = reserve(pool, self.rows)
            self._reserved_groups = opened
            steps.clear()
        for group in pool.groups:
            if group.is_open and group.layers[0] not in steps:
                window = group.window
                read_first = window is not None and is_read_first(window, self.rows, count)
                step = GroupStep(
                    pool, group, self.rows, self.transaction, read_first=read_first, count=count
                )
                steps.update(dict.fromkeys(group.layers, step))
        return steps

    def take(self, layers: Iterable[int]) -> None:
        """Note that these layers have taken the step."""
        self.waiting.difference_update(layers)
        for taken, progress in self._notes:
            taken.update(dict.fromkeys(layers, progress))

    def _prepare(
        self, layer: int, keys: mx.array, values: mx.array
    ) -> tuple[GroupStep, LayerPages]:
        """The step and the pages of a layer that was never written, or that begins a step for which
        no mask was made."""
        group = self.pool.group_of(layer)
        pages = group.pages.get(layer) or group.open_layer(layer, LayerGeometry.of(keys, values))
        return self.group_steps()[layer], pages

    def _reserve_skipped(self) -> None:
        """Allocate blocks for pages that rings never hold, before the first write: only a step that
        is written fills them."""
        self._keeps_skipped = False
        for row in self.rows:
            reserve_skipped(self.pool.reclaimer, self.pool.groups, row.sequence, row.end)

    def _has_tokens(self) -> bool:
        return any(row.sequence.length for row in self.rows)


def write_parts(pages: LayerPages, parts: list[StepPart], step: Unwritten) -> None:
    """Write a step to the pages of a layer, and recode the pages that it fills and leaves."""
    keys, values = step
    for tokens, metadata, resumed, recoded in parts:
        pages.copy(resumed)
        pages.write(keys[:, :, tokens], values[:, :, tokens], metadata)
        pages.copy(recoded)


def keep_unwritten(
    layer: int, rows: list[StepRow], step: Unwritten, metadata: AttentionMetadata
) -> None:
    """Keep the step of one layer at its sequences until it is written; `metadata` tells valid
    tokens from padding."""
    owned = metadata.valid_tokens(step[0].shape[2])
    for at, (row, own) in enumerate(zip(rows, owned, strict=True)):
        row.sequence.keep_unwritten(layer, UnwrittenStep(step, at, own))


def unwritten_step(layer: int, sequences: Iterable[Sequence]) -> Unwritten | None:
    """The unwritten step of exactly these sequences; None if there is none, or if the batch was
    rearranged since."""
    steps = [sequence.unwritten.get(layer) for sequence in sequences]
    first = steps[0] if steps else None
    if first is not None and all(
        each is not None and each.step is first.step and each.row == row
        for row, each in enumerate(steps)
    ):
        return first.step
    return None
