"""Plans a step: the next tokens of some sequences, in all their layers.

Layers write one after the other, and the plan is the same for each: the tokens of each sequence,
their blocks, and the visible tokens. So the first layer that writes, or the model's request for a
mask, begins a step, and the other layers take the same one from their `Batch`. Any other change to
one of the sequences closes the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cached_property
from itertools import count as numbers
from typing import Any, NamedTuple

import mlx.core as mx

from paged_kv.allocator.block_allocator import BlockTable
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, Unwritten
from paged_kv.kernels.pages.choice import tokens_read
from paged_kv.kernels.pages.errors import PagesNotRead
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import LayerGeometry
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.blocks import Scratch, is_read_first, reserve, reserve_skipped
from paged_kv.steps.metadata import StepPart, Visibility, attention_metadata, step_parts
from paged_kv.steps.progress import UnwrittenStep
from paged_kv.steps.recognised_arrays import placeholder
from paged_kv.steps.sequence import StepRow, offset_of

step_numbers = numbers()
"""The numbers of steps, in the order in which they begin."""


class Step:
    """S tokens of some sequences. `Batch` makes steps.

    As a context, it undoes the step if the block raises, Ctrl-C included. The caller holds the
    pool's lock.

    Args:
        rows: the step in each sequence.
        count: S, padding included; 0 to read the tokens that were written.
        layers: the layers that take the step; all have the same tokens.

    Attributes:
        number: of `step_numbers`.
        shape: numbers of sequences and of tokens.
        waiting: the layers that have not taken the step yet; its sequences ask for it.
        is_open: whether the step still holds: no sequence has changed in another way since it
            began.
        is_unread: whether attention has not read the latest layer's keys and values yet, where it
            must.
        scratch: blocks that an open step needs beside the block tables.
        attending: in a model's step, the layers whose arrays only attention can read.
    """

    def __init__(self, pool: PagePool, rows: list[StepRow], count: int, layers: Set[int]) -> None:
        self.number = next(step_numbers)
        self.pool = pool
        self.rows = rows
        self.shape = (len(rows), count)
        self.layers = layers
        self.waiting: set[int] = set(layers) if count else set()
        self.is_open = True
        self.is_unread = False
        self.scratch: Scratch | None = None
        self.attending: frozenset[int] = frozenset()
        self._reserved_groups = 0
        self._groups: dict[int, GroupStep] = {}
        self._keeps_skipped = False

    def begin(self) -> Step:
        """Let the sequences take part in the step, which closes any other of theirs."""
        for row in self.rows:
            row.sequence.begin_step(self, row)
            self._keeps_skipped |= row.sequence.caches_out_of_window
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.undo()

    @cached_property
    def offset_before(self) -> int | mx.array:
        """The position of the first token: a number for one sequence, int32 [B] for a batch."""
        return offset_of([row.before.offset for row in self.rows])

    @cached_property
    def offset_after(self) -> int | mx.array:
        """The position after the last token."""
        return offset_of([row.after.offset for row in self.rows])

    def begin_in_model(self) -> None:
        """Let a model take the step, and reserve blocks for it.

        Raises:
            PoolExhausted: the budget does not hold them; nothing was changed.
        """
        with self.pool.lock, self:
            self.group_steps()
        pool, is_decode = self.pool, self.shape[1] == 1
        self.attending = pool.attending_in_decode if is_decode else pool.attending

    def before_write(
        self, layer: int, keys: mx.array, values: mx.array
    ) -> tuple[GroupStep, LayerPages, Placeholders]:
        """Take the step in a layer that is about to write these keys and values; returns its
        group's part of the step, its pages, and what stands for all its tokens.

        Raises:
            PagesNotRead: attention has not read the keys and values of the layer before.
            ValueError: shapes or dtypes do not fit the layer.
            PoolExhausted: the budget does not hold the step's blocks.
        """
        if self.is_unread:
            raise PagesNotRead(self.pool.name)
        step = self._groups.get(layer)
        pages = None if step is None else step.group.pages.get(layer)
        if step is None or pages is None:
            # It was never written, or begins a step for which no mask was made.
            group = self.pool.group_of(layer)
            pages = group.pages.get(layer)
            pages = pages or group.open_layer(layer, LayerGeometry.of(keys, values))
            step = self.group_steps()[layer]
        if self._keeps_skipped:
            # Not before the first write: only a step that is written fills them.
            self._keeps_skipped = False
            reserve_skipped(self.pool, self.rows)
        given = keys.shape, values.shape, keys.dtype, values.dtype
        arrays = step.placeholders.get(id(pages.geometry))
        if arrays is None or arrays.given != given:
            arrays = step.make_placeholders(layer, keys, values)
        if step.moves != step.group.moves:
            step.locate()
        # Before the write: one that fails may have overwritten a ring's tokens.
        self.waiting.discard(layer)
        return step, pages, arrays

    def undo(self) -> None:
        """Let the sequences be as they were before the step, which has failed in some layer, unless
        they have changed in another way since."""
        with self.pool.lock:
            for step in set(self._groups.values()):
                for metadata in (step.metadata, *[part.metadata for part in step.parts]):
                    for pages in step.group.pages.values():
                        pages.forget_unwritten(metadata)
            sequences = [row.sequence for row in self.rows]
            # All numbers first: giving back blocks may fail too, and does no harm later.
            for sequence in [each for each in sequences if each.undo(self)]:
                sequence.shrink()

    def group_step(self, layer: int, *, read_first: bool) -> GroupStep:
        """The step in the group of a layer that has taken it, to be read. With `read_first`, no
        page holds it."""
        step = self._groups.get(layer)
        if step is None:
            group = self.pool.group_of(layer)
            step = self._groups[layer] = GroupStep(group, self.rows, 0, read_first=read_first)
        return step

    def group_steps(self) -> dict[int, GroupStep]:
        """The step in each layer's group, for groups that are open, with all blocks that it needs.

        The block size of other groups is unknown until their first write.

        Raises:
            PoolExhausted: the budget does not hold the step's blocks.
        """
        pool, rows, steps = self.pool, self.rows, self._groups
        is_new, opened = not steps, 0
        for group in pool.groups:
            if is_new and not group.knows_all_layers and any(row.sequence.length for row in rows):
                group.record_second_step()
            opened += group.is_open
        if opened != self._reserved_groups:
            for row in rows:
                if row.sequence.unwritten:
                    row.sequence.write_unwritten(self.waiting)
            self.scratch = reserve(pool, rows)
            self._reserved_groups = opened
            steps.clear()
        count = self.shape[1]
        for group in pool.groups:
            if group.is_open and group.layers[0] not in steps:
                window = group.window
                read_first = window is not None and is_read_first(window, rows, count)
                scratch = None if self.scratch is None else self.scratch.get(group)
                step = GroupStep(group, rows, count, read_first=read_first, scratch=scratch)
                steps.update(dict.fromkeys(group.layers, step))
        return steps


class Placeholders(NamedTuple):
    """Arrays with the shapes of all keys and values of a layer, which cannot be computed, and the
    shapes and dtypes of the step's own that they were made for."""

    given: tuple[Any, ...]
    keys: mx.array
    values: mx.array


class Seen(NamedTuple):
    """What the queries of a step see by a mask, see `visible`."""

    mask: object
    queries: int
    visibility: Visibility | None


class GroupStep:
    """What kernels need of a step in the layers of one group. It does not hold the step, which
    holds it.

    Args:
        count: S of a step that is to be written, 0 of one that is only read.
        read_first: whether the step's queries attend before any page holds it.
        scratch: the scratch blocks of the group, see `step_parts`.

    Attributes:
        metadata: where the tokens are after the step, the same object for all layers.
        parts: the parts that the step is written and attended to in; none if it need not be cut.
        needs_step: whether reads need the step's keys and values besides its pages.
        moves: the group's `moves` when the metadata was made.
        placeholders: of layers, by the id of their geometry object, which layers share.
        seen: what the latest mask lets the queries see: layers usually get the same one.
    """

    metadata: AttentionMetadata
    needs_step: bool

    def __init__(
        self,
        group: LayerGroup,
        rows: list[StepRow],
        count: int,
        *,
        read_first: bool,
        scratch: Mapping[str, BlockTable] | None = None,
    ) -> None:
        self.group = group
        self.read_first = read_first
        self.parts: list[StepPart] = []
        self.placeholders: dict[int, Placeholders] = {}
        self.seen = Seen(None, 0, None)
        self.has_counted_choice = False
        self._count = count
        self._rows = rows
        self._scratch = scratch or {}
        self.locate()

    def locate(self) -> None:
        """Find where the tokens are; again, if pages have moved."""
        group, rows = self.group, self._rows
        self.moves = group.moves
        self.metadata = attention_metadata(group, rows, read_first=self.read_first)
        if self._count > 1 and group.window is None:
            self.parts = step_parts(group, rows, self._count, self._scratch)
        self.needs_step = self.read_first or bool(self.parts)

    def follow_moves(self) -> None:
        if self.moves != self.group.moves:
            self.locate()

    def make_placeholders(self, layer: int, keys: mx.array, values: mx.array) -> Placeholders:
        """Those of a layer that gets these keys and values; layers of its geometry share them.

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
        found = self.placeholders[id(geometry)] = Placeholders(given, all_keys, all_values)
        return found

    def write_apart(self, layer: int, pages: LayerPages, step: Unwritten) -> None:
        """Write a step that `needs_step`: keep it until its queries have attended, or write it in
        parts, and recode the pages that it fills and leaves."""
        keys, values = step
        if self.read_first:
            owned = self.metadata.valid_tokens(keys.shape[2])
            for at, (row, own) in enumerate(zip(self._rows, owned, strict=True)):
                row.sequence.keep_unwritten(layer, UnwrittenStep(step, at, own))
            return
        for tokens, metadata, resumed, recoded in self.parts:
            pages.copy(resumed)
            pages.write(keys[:, :, tokens], values[:, :, tokens], metadata)
            pages.copy(recoded)

    def count_choice(self, pool: PagePool, read_tokens: int) -> None:
        """Count the tokens that a step which chooses reads and leaves out, once for all layers."""
        if self.has_counted_choice:
            return
        self.has_counted_choice = True
        for length in self.metadata.context_lens:
            read = tokens_read(length, read_tokens)
            if read < length:
                pool.counts.tokens_chosen += read
                pool.counts.tokens_left_out += length - read
