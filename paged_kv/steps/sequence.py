"""Tracks a sequence: its blocks in every group, and the number of tokens in each layer."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass
from threading import Thread, current_thread
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from paged_kv.allocator.block_allocator import BlockTable
from paged_kv.allocator.byte_budget import locked
from paged_kv.allocator.prefixes.prefix_node import OutOfWindowBlock
from paged_kv.checks import described
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageFormat
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool, require_pool
from paged_kv.steps.progress import (
    NO_PADDING,
    GroupInputs,
    LayerProgress,
    Padding,
    Progress,
    StepProgress,
    UnwrittenStep,
)


class OpenStep(Protocol):
    """What a sequence knows of its current step, a `Step`. The step holds the sequence, so the
    sequence does not hold the step."""

    is_open: bool
    scratch: Any
    layers: Set[int]
    waiting: set[int]


@dataclass(frozen=True, eq=False)
class BatchStates:
    """The caches without pages of a batch, as they were after a step."""

    caches: list[Any]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


class PromptStates(NamedTuple):
    """The states of one sequence when its prompt ended, after so many tokens: those of its batch,
    of which it is the `row`-th of `batch_size` sequences."""

    num_tokens: int
    batch: BatchStates
    row: int
    batch_size: int

    def states(self) -> list[Any]:
        if self.batch_size == 1:
            return self.batch.caches
        return deepcopy([each.extract(self.row) for each in self.batch.caches])


class LayerwiseSequences:
    """Sequences that all layers of a prompt cache ask for, one layer after the other: the first one
    makes them, and the others get the same ones. A layer that asks a second time gets others, and
    so does each thread."""

    def __init__(self) -> None:
        self._made: list[tuple[Thread, list[weakref.ref[Sequence]], set[int]]] = []

    def get(self, layer: int, count: int, make: Callable[[], Sequence]) -> list[Sequence]:
        """The `count` sequences that a layer gets."""
        me = current_thread()
        for thread, refs, layers in self._made:
            known = [each for ref in refs if (each := ref()) is not None]
            if thread is me and layer not in layers and len(known) == len(refs) == count:
                layers.add(layer)
                return known
        made = [make() for _ in range(count)]
        # Without those that nobody holds any more: a batch may be merged again and again.
        self._made = [entry for entry in self._made if any(ref() for ref in entry[1])]
        self._made.append((me, [weakref.ref(each) for each in made], {layer}))
        return made

    def clear(self) -> None:
        self._made.clear()


class Sequence:
    """Owns blocks, and frees them when no cache refers to it any more.

    All layers have the same tokens, but for a few while a step, or another operation that mlx-lm
    calls for each layer, goes from layer to layer. The layers that ask for a fork get the same one.

    Attributes:
        uid: the sequence's name, the same for all its layers.
        page_format: the format of full pages, the first one but for `PageFormat.first`; pages that
            are written have 16 bits.
        is_converting: whether some full pages may still have another format, because a conversion
            ran out of memory.
        model_version: the version of the model that computed all its tokens, or None if that is not
            known or not one.
        unwritten: the latest step of each layer whose ring does not hold it yet.
        prompt_tokens: the length of the prompt that it was fetched for, or 0: later tokens were
            generated.
        prompt_states: the states of layers without pages when its prompt ended, or None.
        canonical_tokens: how many of its first tokens were computed as pages of a prompt, each in
            one piece: in any sequence that begins with them they have the same bits.
        caches_out_of_window: whether pages that leave a window stay cached for later prompts.
        out_of_window: those cached pages, per group with a window, by page number.
        layers: how far each layer is, and can be rolled back.
        of_head: what a prediction head keeps of the latest tokens, or None; forks share it.
        hooks: what stays replaced in the model's modules while the sequence exists.
        tables: the sequence's block tables; `table` makes those of other groups.

    Raises:
        TypeError: `pool` is no pool, or `page_format` is no `PageFormat`.
    """

    def __init__(self, pool: PagePool, page_format: PageFormat | None = None) -> None:
        require_pool("pool", pool)
        if not isinstance(page_format, PageFormat | None):
            raise TypeError(f"page_format must be a PageFormat, got {described(page_format)}")
        self.pool = pool
        self.hooks = pool.hooks
        self.lock = pool.lock
        self.page_format = page_format or pool.page_format
        self.is_converting = False
        self.model_version: int | None = None
        self.uid = uuid.uuid4().hex
        self.layers = LayerProgress(pool, [Progress()] * pool.num_layers)
        self.of_head: Any = None
        self.unwritten: dict[int, UnwrittenStep] = {}
        self.prompt_tokens = 0
        self.prompt_states: PromptStates | None = None
        self.canonical_tokens = 0
        self.caches_out_of_window = False
        self.out_of_window: dict[LayerGroup, dict[int, OutOfWindowBlock]] = {}
        self._step: weakref.ref[OpenStep] | None = None
        # `inputs` and `unwritten` before the current step.
        self._before: tuple[Mapping[tuple[int, str], GroupInputs], dict[int, UnwrittenStep]]
        self.tables: dict[LayerGroup, BlockTable] = {}
        self._forks = LayerwiseSequences()
        weakref.finalize(self, _drop_tables, self.tables).atexit = False

    @property
    def context_lens(self) -> list[int]:
        return [self.progress(layer).tokens for layer in range(self.pool.num_layers)]

    @property
    def length(self) -> int:
        return self.layers.length

    def record_version(self, version: int) -> None:
        """Record the version of the model that computes the next tokens."""
        if not self.length:
            self.model_version = version
        elif self.model_version != version:
            self.model_version = None

    def record_piece(self, begin: int, end: int) -> None:
        """Record that the tokens [begin, end) were computed as a piece of a prompt."""
        if begin == self.canonical_tokens and end - begin == PAGE_SIZE:
            self.canonical_tokens = end

    def progress(self, layer: int) -> Progress:
        return self.layers.of(layer)

    @locked
    def table(self, group: LayerGroup) -> BlockTable:
        """The block table in a group, which must be open."""
        if group not in self.tables:
            self.tables[group] = group.new_table(self.page_format)
            self.tables[group].owner = self.uid
        return self.tables[group]

    def blocks(self, group: LayerGroup) -> tuple[int, ...]:
        """The blocks in a group, in table order."""
        table = self.tables.get(group)
        return () if table is None else table.blocks

    def next_step(self, layer: int, count: int) -> StepRow:
        """The step of a layer's next `count` tokens, padding included."""
        before = self.progress(layer)
        return StepRow(self, before, before.after(count))

    def latest_step(self, layer: int) -> StepRow:
        """The step that a layer has taken last."""
        after = self.progress(layer)
        return StepRow(self, after._replace(tokens=after.tokens - after.latest), after)

    def begin_conversion(self, page_format: PageFormat) -> None:
        """Use that format for full pages from now on; the caller converts those there are."""
        self.close_step()
        self.page_format, self.is_converting = page_format, True
        for group, table in self.tables.items():
            if group.window is None:
                table.page_format = page_format.name
                table.first_format = page_format.first.name

    def begin_step(self, step: OpenStep, row: StepRow) -> None:
        """Take part in a step, and close any other."""
        self.close_step()
        if row.after.tokens > row.before.tokens:
            self._forks.clear()
        self._step = weakref.ref(step)
        self._before = self.layers.inputs, self.unwritten
        self.layers.step = StepProgress(step.layers, step.waiting, row.after)

    def close_step(self) -> None:
        """Close the current step, before a change that is not its next layer's write."""
        if self._step is not None:
            step, self._step = self._step(), None
            self.layers.settle()
            if step is not None:
                step.is_open, step.scratch = False, None

    def undo(self, step: OpenStep) -> bool:
        """Undo the writes of all layers in a step, and close it; returns whether it was the current
        one. `shrink` then gives back its blocks."""
        if self._step is None or self._step() is not step:
            return False
        self.layers.inputs, unwritten = self._before
        self._record_overwritten(unwritten)
        self.layers.step = None
        self.close_step()
        self.canonical_tokens = min(self.canonical_tokens, self.length)
        self.prompt_states = None
        # An earlier step that was written to its ring since then stays so.
        kept = self.unwritten.items()
        self.unwritten = {layer: each for layer, each in kept if unwritten.get(layer) is each}
        return True

    def _record_overwritten(self, before: Mapping[int, UnwrittenStep]) -> None:
        """Record what the current step has written over in rings: no undo brings it back."""
        for layer in self.pool.windows:
            tokens = self.layers.settled[layer].tokens
            is_unwritten = self.unwritten.get(layer) not in (None, before.get(layer))
            if 0 < tokens < self.progress(layer).tokens and not is_unwritten:
                group = self.pool.group_of(layer)
                self.layers.record_trim(group, self.layers.written(group))

    @locked
    def commit(self, layers: Set[int] | None = None) -> None:
        """Write the unwritten steps of all layers, or of `layers`. No query can attend to the
        latest step of these afterwards."""
        if self.unwritten:
            self.close_step()
            self.write_unwritten(layers)

    @locked
    def write_unwritten(self, layers: Set[int] | None) -> None:
        """As `commit`, but leaves the current step open, which the layers are about to take."""
        for layer in [each for each in self.unwritten if layers is None or each in layers]:
            group, progress = self.pool.group_of(layer), self.progress(layer)
            assert group.window is not None
            self.unwritten[layer].write_to_ring(
                group.pages[layer],
                group.window,
                self.table(group),
                self.out_of_window.get(group, {}),
                progress.tokens,
            )
            self.unwritten = {at: each for at, each in self.unwritten.items() if at != layer}
            self.layers.settled[layer] = progress._replace(latest=0)

    def keep_unwritten(self, layer: int, step: UnwrittenStep) -> None:
        # Not in place: `undo` needs the former ones.
        self.unwritten = {**self.unwritten, layer: step}
        self.pool.unwritten.add(step)

    def restore(self, layer: int, context_len: int, written_len: int) -> None:
        """Record that a layer was filled from a saved sequence."""
        self.close_step()
        self.layers.set(layer, Progress(context_len))
        self.layers.record_trim(self.pool.group_of(layer), written_len)

    @property
    def rollback(self) -> int:
        """The most tokens that can be trimmed: all, unless a ring has overwritten some."""
        return self.layers.most_to_trim()

    def trim(self, layer: int, count: int) -> int:
        """Remove the last `count` tokens of one layer, or all if it has fewer; returns how many.

        The last layer that trims frees the blocks.

        Raises:
            RollbackError: the ring of this or another layer has overwritten tokens that would be
                needed; nothing was changed.
        """
        self.layers.require_rollback(layer, count)
        self.close_step()
        self.commit()
        tokens, _, padding = self.progress(layer)
        count = min(count, tokens)
        self.layers.record_trim(self.pool.group_of(layer), tokens)
        self.layers.drop_inputs(layer, count)
        self.layers.set(layer, Progress(tokens - count, 0, padding))
        self.canonical_tokens = min(self.canonical_tokens, tokens - count)
        if self.prompt_states is not None and tokens - count < self.prompt_states.num_tokens:
            self.prompt_states = None
        self.shrink()
        return count

    def prepare(self, layer: int, padding: Padding) -> None:
        """Set the padding of the coming steps in one layer."""
        self.close_step()
        self.layers.set(layer, self.progress(layer)._replace(padding=padding))
        self.shrink()

    def finalize(self, layer: int) -> None:
        """End the padding in one layer, and trim the padding that was written."""
        progress = self.progress(layer)
        self.close_step()
        self.layers.set(layer, progress._replace(padding=NO_PADDING))
        self.trim(layer, progress.padding.to_trim)

    @locked
    def fork(self, layer: int) -> Sequence:
        """A sequence that shares all present blocks with this one; see `LayerwiseSequences`."""
        (fork,) = self._forks.get(layer, 1, self._copy)
        return fork

    @locked
    def adopt(self, group: LayerGroup, blocks: list[int], num_tokens: int) -> None:
        """Share cached blocks with the first `num_tokens` tokens of a group. The sequence must have
        no blocks there."""
        self.close_step()
        table = self.table(group)
        assert not table.blocks, "the sequence has tokens"
        group.allocator.refs.retain(blocks)
        table.change(tuple(blocks), num_tokens)

    def begin_at(self, num_tokens: int, written: Mapping[LayerGroup, int]) -> None:
        """Set the number of tokens in every layer, after `adopt`. `written` gives the number of
        tokens that the rings of some groups count as written."""
        self.close_step()
        self.layers.states_len = num_tokens
        for group in self.pool.groups:
            for layer in group.pages:
                self.layers.set(layer, self.progress(layer)._replace(tokens=num_tokens))
            self.layers.record_trim(group, written.get(group, 0))
        self.shrink()

    @locked
    def _copy(self) -> Sequence:
        self.close_step()
        self.commit()
        copy = Sequence(self.pool, self.page_format)
        copy.model_version, copy.prompt_tokens = self.model_version, self.prompt_tokens
        copy.prompt_states = self.prompt_states
        copy.canonical_tokens = self.canonical_tokens
        copy.caches_out_of_window = self.caches_out_of_window
        copy.is_converting, copy.hooks = self.is_converting, self.hooks
        # No query can attend to the latest step.
        settled = [Progress(tokens, 0, padding) for tokens, _, padding in self.layers.settled]
        copy.layers = LayerProgress(self.pool, settled)
        copy.layers.trimmed, copy.layers.inputs = self.layers.trimmed, self.layers.inputs
        copy.layers.states_len = self.layers.states_len
        copy.of_head = self.of_head
        copy.out_of_window = {group: dict(pages) for group, pages in self.out_of_window.items()}
        for group, table in self.tables.items():
            copy.tables[group] = group.allocator.fork(table)
            copy.tables[group].owner = copy.uid
        return copy

    @locked
    def shrink(self) -> None:
        """Shorten tables to the layers' present tokens, after a trim or an unused reservation."""
        self.close_step()
        self._forks.clear()
        for group, table in self.tables.items():
            window, tokens = group.window, self.layers.longest(group.layers)
            if window is not None and window.first_held(self.layers.written(group)):
                table.rewind(tokens)
            else:
                table.truncate(tokens)
            # Other tokens will follow this length, so longer cached pages no longer fit.
            out_of_window = self.out_of_window.get(group, {})
            for page in [page for page in out_of_window if (page + 1) * PAGE_SIZE > tokens]:
                del out_of_window[page]


class StepRow(NamedTuple):
    """A step in one sequence: how far the layers that take it are before and after it."""

    sequence: Sequence
    before: Progress
    after: Progress


def offset_of(positions: list[int]) -> int | mx.array:
    """The positions of a batch as models take them: a number for one sequence, int32 [B] for
    several."""
    return positions[0] if len(positions) == 1 else mx.array(positions, dtype=mx.int32)


def _drop_tables(tables: dict[LayerGroup, BlockTable]) -> None:
    # The garbage collector may run this inside the allocator, so it must not touch blocks.
    for table in tables.values():
        table.allocator.drop_later(table)
