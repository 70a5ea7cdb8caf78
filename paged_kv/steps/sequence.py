"""Tracks a sequence: its blocks in every group, and the number of tokens in each layer."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Mapping, Set
from threading import Thread, current_thread

import mlx.core as mx

from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.errors import RollbackError
from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlock
from paged_kv.checks import described
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageFormat
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.locked import locked
from paged_kv.pool.page_pool import PagePool, require_pool
from paged_kv.pool.window import DEFAULT_WRITE_CHUNK
from paged_kv.steps.group_inputs import GroupInputs
from paged_kv.steps.padding import NO_PADDING, Padding
from paged_kv.steps.pending_step import PendingStep, write_pending
from paged_kv.steps.step_progress import StepProgress

_Undoable = tuple[
    list[int],
    list[int],
    list[Padding],
    dict[tuple[int, str], GroupInputs],
    dict[int, PendingStep],
]


class Sequence:
    """Owns blocks, and frees them when no cache refers to it any more.

    Layers write one after the other, so their context lengths differ within a step. mlx-lm calls
    the cache of each layer separately: the layers that ask for a fork get the same one.

    Attributes:
        uid: the sequence's name, the same for all its layers.
        page_format: the format of full pages; pages that are written have 16 bits.
        is_converting: whether some full pages may still have another format, because a conversion
            ran out of memory.
        model_version: the version of the model's weights at the sequence's start, or None.
        context_lens: number of tokens, per layer.
        written_lens: the most tokens that there ever were, per layer. A ring has overwritten
            tokens too far before those.
        step_lens: tokens of the latest step, per layer; 0 once no query can attend to it.
        padding: the padding in a batch, per layer.
        pending: the latest step of each layer that has not written it yet.
        caches_out_of_window: whether pages that leave a window stay cached for later prompts.
        out_of_window: those cached pages, per group with a window, by page number.
        inputs: of layers that append rows, what open groups are computed from, by layer and name.
        tables: the sequence's block tables; `table` makes those of other groups.

    Raises:
        TypeError: `pool` is no pool, or `page_format` is no `PageFormat`.
    """

    def __init__(self, pool: PagePool, page_format: PageFormat | None = None) -> None:
        require_pool("pool", pool)
        if not isinstance(page_format, PageFormat | None):
            raise TypeError(f"page_format must be a PageFormat, got {described(page_format)}")
        self.pool = pool
        self.lock = pool.lock
        self.page_format = page_format or pool.page_format
        self.is_converting = False
        self.model_version: int | None = None
        self.uid = uuid.uuid4().hex
        self._context_lens = [0] * pool.num_layers
        self._written_lens = [0] * pool.num_layers
        self._step_lens = [0] * pool.num_layers
        self._padding = [NO_PADDING] * pool.num_layers
        self._states_len = 0
        self.pending: dict[int, PendingStep] = {}
        self.caches_out_of_window = False
        self.out_of_window: dict[LayerGroup, dict[int, OutOfWindowBlock]] = {}
        self.inputs: dict[tuple[int, str], GroupInputs] = {}
        # The latest step, how many of the layers that took it are noted here, and what it changes.
        self._step: StepProgress | None = None
        self._noted = 0
        self._change = 0, 0, NO_PADDING
        self._before_step = self._undoable()
        self.tables: dict[LayerGroup, BlockTable] = {}
        self._forks: list[tuple[Thread, weakref.ref[Sequence], set[int]]] = []
        weakref.finalize(self, _drop_tables, self.tables).atexit = False

    @property
    def context_lens(self) -> list[int]:
        self._follow_step()
        return self._context_lens

    @property
    def written_lens(self) -> list[int]:
        self._follow_step()
        return self._written_lens

    @property
    def step_lens(self) -> list[int]:
        self._follow_step()
        return self._step_lens

    @property
    def padding(self) -> list[Padding]:
        self._follow_step()
        return self._padding

    @property
    def length(self) -> int:
        """Number of tokens of the layer that has most; without such layers, of the states."""
        return max(self.context_lens, default=self._states_len)

    def offset(self, layer: int) -> int:
        """The position of the next step's first token; negative if that token is padding."""
        tokens, padding = self.progress(layer)
        return tokens + padding.right - padding.left

    def progress(self, layer: int) -> tuple[int, Padding]:
        """The number of tokens in a layer, and its padding."""
        self._follow_step()
        return self._context_lens[layer], self._padding[layer]

    @property
    def is_even(self) -> bool:
        """Whether all layers have the same tokens and padding."""
        self._follow_step()
        lens, padding = self._context_lens, self._padding
        return lens.count(lens[0]) == len(lens) == padding.count(padding[0])

    @locked
    def table(self, group: LayerGroup) -> BlockTable:
        """The sequence's block table in a group, which must be open."""
        if group not in self.tables:
            self.tables[group] = group.new_table(self.page_format)
            self.tables[group].owner = self.uid
        return self.tables[group]

    def blocks(self, group: LayerGroup) -> tuple[int, ...]:
        """The sequence's blocks in a group, in table order."""
        table = self.tables.get(group)
        return () if table is None else table.blocks

    def is_held_in(self, page_format: PageFormat) -> bool:
        """Whether all full pages have that format, or get it when the next step begins, so that a
        conversion has nothing to do."""
        return self.page_format == page_format and not self.is_converting

    def begin_conversion(self, page_format: PageFormat) -> None:
        """Use that format for full pages from now on; the caller converts those there are."""
        self.close_step()
        self.page_format, self.is_converting = page_format, True
        for group, table in self.tables.items():
            if group.window is None:
                table.page_format = page_format.name

    def begin_step(self, step: StepProgress, before: int, end: int, padding: Padding) -> None:
        """Take part in a step that brings its layers from `before` to `end` tokens, and leaves that
        padding. Closes any other step."""
        self.close_step()
        self._step, self._noted, self._change = step, 0, (before, end, padding)
        self._before_step = self._undoable()
        if end > before:
            self._forks.clear()

    def close_step(self) -> None:
        """Close the current step, before a change that is not its next layer's write."""
        step = self._step
        if step is not None:
            self._follow_step()
            self._step = None
            step.close()

    @locked
    def commit(self, layers: Set[int] | None = None) -> None:
        """Write the pending steps of all layers, or of `layers`. No query can attend to the latest
        step of these afterwards."""
        if self.pending:
            self.close_step()
            self.write_pending(layers)

    @locked
    def write_pending(self, layers: Set[int] | None) -> None:
        """As `commit`, but leaves the current step open, which the layers are about to take."""
        for layer in [each for each in self.pending if layers is None or each in layers]:
            group = self.pool.group_of(layer)
            assert group.window is not None
            write_pending(
                group.pages[layer],
                group.window,
                self.table(group),
                self.out_of_window.get(group, {}),
                self.pending[layer],
                self.context_lens[layer],
            )
            del self.pending[layer]
            self.step_lens[layer] = 0

    def restore(self, layer: int, context_len: int, written_len: int) -> None:
        """Note that a layer was filled from a saved sequence."""
        self.close_step()
        self.context_lens[layer], self.written_lens[layer] = context_len, written_len

    def undo(self, step: StepProgress) -> bool:
        """Undo the writes of all layers in a step, and close it; returns whether it was the current
        one. `shrink` then gives back its blocks."""
        if self._step is not step:
            return False
        self.close_step()
        context_lens, written_lens, padding, self.inputs, pending = self._before_step
        for layer, context_len in enumerate(context_lens):
            is_pending = self.pending.get(layer) not in (None, pending.get(layer))
            if is_pending:
                del self.pending[layer]
            if self._context_lens[layer] > context_len:
                self._context_lens[layer] = context_len
                # A written ring has lost the tokens that the step overwrote.
                if is_pending or not context_len:
                    self._written_lens[layer] = written_lens[layer]
        self._padding[:] = padding
        return True

    @property
    def rollback(self) -> int:
        """The most tokens that can be trimmed: all, unless a ring has overwritten some."""
        possible = [self.length]
        for layer, window in self.pool.windows.items():
            shortest = window.shortest_rollback(self.written_lens[layer])
            possible.append(self.context_lens[layer] - shortest)
        possible += [self.length - self._shortest_of_rows(layer) for layer in self.pool.rows]
        return max(0, min(possible))

    def trim(self, layer: int, count: int) -> int:
        """Remove the last `count` tokens of one layer, or all if it has fewer; returns how many.

        The last layer that trims frees the blocks.

        Raises:
            RollbackError: the ring of this or another layer has overwritten tokens that would be
                needed; nothing was changed.
        """
        self.require_rollback(layer, count)
        self.close_step()
        self.commit()
        count = min(count, self.context_lens[layer])
        self.context_lens[layer] -= count
        if not self.context_lens[layer]:
            self.written_lens[layer] = 0
        self.step_lens[layer] = 0
        self.inputs = {
            key: inputs.without_last(count) if key[0] == layer else inputs
            for key, inputs in self.inputs.items()
        }
        self.shrink()
        return count

    def require_rollback(self, layer: int, count: int) -> None:
        """Raise the RollbackError of `trim`, if any."""
        target = max(0, self.context_lens[layer] - count)
        for other, window in self.pool.windows.items():
            shortest = window.shortest_rollback(self.written_lens[other])
            if target < min(shortest, self.context_lens[other]):
                raise RollbackError(count, self.rollback)
        for other, rows in self.pool.rows.items():
            if target % rows.rate and target < self._shortest_of_rows(other):
                raise RollbackError(count, self.rollback)

    def prepare(self, layer: int, padding: Padding) -> None:
        """Set the padding of the coming steps in one layer."""
        self.close_step()
        self.padding[layer] = padding
        self.shrink()

    def finalize(self, layer: int) -> None:
        """End the padding in one layer, and trim the padding that was written."""
        to_trim = self.padding[layer].to_trim
        self.close_step()
        self.padding[layer] = NO_PADDING
        self.trim(layer, to_trim)

    @locked
    def fork(self, layer: int) -> Sequence:
        """A sequence that shares all present blocks with this one.

        The first layer that asks makes the fork, and the other layers get the same one. A layer
        that asks a second time gets a second fork. Each thread gets forks of its own.
        """
        me = current_thread()
        for thread, ref, asked in self._forks:
            fork = ref()
            if fork is not None and thread is me and layer not in asked:
                asked.add(layer)
                return fork
        fork = self._copy()
        self._forks = [entry for entry in self._forks if entry[1]() is not None]
        self._forks.append((me, weakref.ref(fork), {layer}))
        return fork

    @locked
    def adopt(self, group: LayerGroup, blocks: list[int], num_tokens: int) -> None:
        """Share cached blocks with the first `num_tokens` tokens of a group. The sequence must have
        no blocks there."""
        self.close_step()
        table = self.table(group)
        assert not table.blocks, "the sequence has tokens"
        group.allocator.retain(blocks)
        table.change(tuple(blocks), num_tokens)
        group.allocator.events.adopted(table, blocks)

    def begin_at(self, num_tokens: int, written: Mapping[LayerGroup, int]) -> None:
        """Set the number of tokens in every layer, after `adopt`. `written` gives the number of
        tokens that the rings of some groups count as written."""
        self.close_step()
        self._states_len = num_tokens
        for group in self.pool.groups:
            for layer in group.pages:
                self.context_lens[layer] = num_tokens
                self.written_lens[layer] = written.get(group, num_tokens)
        self.shrink()

    def written(self, group: LayerGroup) -> int:
        """The most tokens that any layer of a group ever had."""
        return max(self.written_lens[layer] for layer in group.layers)

    @locked
    def _copy(self) -> Sequence:
        """A new sequence that shares all present blocks with this one."""
        self.close_step()
        self.commit()
        copy = Sequence(self.pool, self.page_format)
        copy.model_version, copy.caches_out_of_window = (
            self.model_version,
            self.caches_out_of_window,
        )
        copy.is_converting = self.is_converting
        copy._context_lens, copy._written_lens = list(self._context_lens), list(self._written_lens)
        copy._padding = list(self._padding)
        copy.shrink()
        copy.inputs = self.inputs
        copy.out_of_window = {group: dict(pages) for group, pages in self.out_of_window.items()}
        for group, table in self.tables.items():
            copy.tables[group] = group.allocator.fork(table)
            copy.tables[group].owner = copy.uid
        return copy

    def _shortest_of_rows(self, layer: int) -> int:
        """The shortest length to which a layer that appends rows can be trimmed wherever its group
        is open."""
        rows, length = self.pool.rows[layer], self.context_lens[layer]
        kept = [len(self.inputs.get((layer, each.name), ())) for each in rows.inputs]
        first = length - min(kept, default=length)
        return -(-first // rows.rate) * rows.rate

    def note_inputs(self, layer: int, name: str, inputs: mx.array) -> None:
        """Keep what a step adds to open groups, for as many tokens as rings can roll back."""
        chunks = [window.write_chunk for window in self.pool.windows.values()]
        most = self.pool.rows[layer].rate + min(chunks, default=DEFAULT_WRITE_CHUNK)
        kept = self.inputs.get((layer, name), GroupInputs()).followed_by(inputs, most)
        self.pool.pending.add(kept)
        # Not in place: `undo` needs the former ones.
        self.inputs = {**self.inputs, (layer, name): kept}

    def _undoable(self) -> _Undoable:
        """What a step changes."""
        pending = dict(self.pending) if self.pending else {}
        return self._context_lens, self._written_lens, self._padding, self.inputs, pending

    def _follow_step(self) -> None:
        """Note which layers have taken the latest step."""
        if self._step is None or len(self._step.layers) == self._noted:
            return
        layers = self._step.layers[self._noted :]
        self._noted += len(layers)
        before, end, padding = self._change
        everywhere = len(self._context_lens)
        if len(layers) == everywhere and max(self._written_lens) <= end:
            self._context_lens, self._written_lens = [end] * everywhere, [end] * everywhere
            self._step_lens, self._padding = [end - before] * everywhere, [padding] * everywhere
            return
        # Not in place: `undo` needs the former numbers.
        self._context_lens, self._written_lens = list(self._context_lens), list(self._written_lens)
        self._padding = list(self._padding)
        for layer in layers:
            self._context_lens[layer] = end
            self._written_lens[layer] = max(end, self._written_lens[layer])
            self._step_lens[layer] = end - before
            self._padding[layer] = padding

    @locked
    def shrink(self) -> None:
        """Shorten tables to the layers' present tokens, after a trim or an unused reservation."""
        self.close_step()
        self._forks.clear()
        for group, table in self.tables.items():
            window, tokens = group.window, max(self.context_lens[layer] for layer in group.layers)
            if window is not None and window.first_held(self.written(group)):
                table.rewind(tokens)
            else:
                table.truncate(tokens)
            # Other tokens will follow this length, so longer cached pages no longer fit.
            out_of_window = self.out_of_window.get(group, {})
            for page in [page for page in out_of_window if (page + 1) * PAGE_SIZE > tokens]:
                del out_of_window[page]


def _drop_tables(tables: dict[LayerGroup, BlockTable]) -> None:
    # The garbage collector may run this inside the allocator, so it must not touch blocks.
    for table in tables.values():
        table.allocator.drop_later(table)
