"""A step of one token per sequence, for `mx.compile` to record.

The shapes of such a step do not change from token to token: slabs are fixed, and block tables have
room to spare. So what a model does in it can be recorded once, and repeated without Python on other
arrays. A `RecordableStep` is a step whose numbers are in arrays. While it is recorded, the model
gets a `RecordedStep` in its place, and so arrays of MLX's graph, or such as cannot be computed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import filled_key
from paged_kv.kernels.pages.backend import StepRecorder
from paged_kv.kernels.pages.choice import exceeds, exceeds_key
from paged_kv.kernels.pages.layer_memory import MAX_SLABS, WRITABLE
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.kernels.pages.tables import TABLES, Tables, tables_of
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.metadata import PagedMask, step_mask
from paged_kv.steps.progress import Progress
from paged_kv.steps.read import PagedKeys, PagedRead, PagedValues
from paged_kv.steps.recognised_arrays import placeholder
from paged_kv.steps.sequence import StepRow
from paged_kv.steps.step import GroupStep, Step

# Beyond all contexts: a recording with the number of its step in it differs at once from a step by
# Python, also where it compares the number with a threshold. A prime and one: a remainder differs.
FAR_TOKENS = 1 + 1_048_583


class NotRecordable(Exception):
    """A model cannot take recorded steps; the message says why."""


class RecordableLayer(NamedTuple):
    number: int
    group: LayerGroup
    pages: LayerPages
    recorder: StepRecorder


def recordable_layers(pool: PagePool) -> list[RecordableLayer]:
    """The pool's layers that have pages.

    Raises:
        NotRecordable: MLX cannot record the operations of a layer, or other code than attention
            uses its keys and values.
    """
    layers = []
    for group in pool.groups:
        for number, pages in group.pages.items():
            recorder = pages.backend.recorder
            if recorder is None:
                raise NotRecordable(f"MLX cannot record the {pages.backend.name} backend")
            if group.offloading is not None:
                raise NotRecordable(f"pages of layer {number} may be out of memory")
            if number not in pool.attending_in_decode:
                raise NotRecordable(f"layer {number} gathers its keys and values")
            layers.append(RecordableLayer(number, group, pages, recorder))
    return layers


@dataclass(eq=False)
class RecordableStep:
    """A step that a recording can take: the layers that take it, and the part and the block tables
    of each group."""

    step: Step
    layers: list[RecordableLayer]
    group_steps: dict[LayerGroup, GroupStep]
    tables: dict[LayerGroup, Tables]

    @property
    def key(self) -> Hashable:
        """All that a recording of it depends on, besides the layers."""
        first = {group: (pages, recorder) for _, group, pages, recorder in reversed(self.layers)}
        return (
            self.step.shape,
            *[
                (each.key, self.leaves_out(group), first[group][1].key(first[group][0], each))
                for group, each in self.tables.items()
            ],
        )

    @classmethod
    def of(cls, step: Step, layers: list[RecordableLayer]) -> RecordableStep | None:
        """The step; None if only Python can take it, because of padding, because a ring is written
        after its queries have attended, or because it has more slabs than a kernel takes, or a
        kernel is wrong.

        Raises:
            PoolExhausted: see `Step.group_steps`.
            ThreadConflict: see `LayerPages.begin_write`.
            QuantisedPage: a page that the step is written to has not 16 bits.
        """
        for row in step.rows:
            padding = row.after.padding
            if row.before.tokens < 1 or not padding.is_none or padding.right:
                return None
        tables: dict[LayerGroup, Tables] = {}
        of_groups: dict[LayerGroup, GroupStep] = {}
        group_steps = step.group_steps()
        for number, group, pages, _ in layers:
            metadata = group_steps[number].metadata
            if group not in tables:
                pages.require_writable(metadata, 1)
                of_groups[group] = group_steps[number]
                tables[group] = tables_of(metadata, pages.slab_stride)
                if group_steps[number].needs_step or len(tables[group].slabs) > MAX_SLABS:
                    return None
            if pages.backend.is_disabled:
                return None
            pages.begin_write(metadata, 1)
        return cls(step, layers, of_groups, tables)

    def leaves_out(self, group: LayerGroup) -> bool:
        """Whether some sequence has more tokens than the layers of a group read."""
        if group.read_tokens is None:
            return False
        return exceeds(self.group_steps[group].metadata, group.read_tokens)

    def arrays(self) -> list[mx.array]:
        """What changes from step to step: positions int32 [B], the tables of each group, and the
        arrays of each layer.

        Raises:
            ThreadConflict: another thread has yet to compute some of them.
        """
        positions = mx.array([row.before.offset for row in self.step.rows], mx.int32)
        arrays = [positions]
        for each in self.tables.values():
            arrays += each.arrays
        for _, group, pages, recorder in self.layers:
            arrays += recorder.arrays(pages, self.tables[group])
        return arrays

    def keep(self, changed: list[mx.array], written: list[int]) -> None:
        """Record that the step was taken: what it changed in each layer, and the layers that wrote,
        in their order."""
        at = 0
        for _, group, pages, recorder in self.layers:
            end = at + recorder.changes(self.tables[group])
            filled = self.group_steps[group].metadata.filled_entries(1)
            recorder.keep(pages, self.tables[group], changed[at:end], filled)
            at = end
        for group, group_step in self.group_steps.items():
            if group.read_tokens is not None and self.leaves_out(group):
                group_step.count_choice(self.step.pool, group.read_tokens)
        self.step.waiting.difference_update(written)


class RecordedStep:
    """Takes the place of a step while it is recorded, with arrays of MLX's in the place of the
    step's. Python numbers are those of a step behind `FAR_TOKENS`."""

    def __init__(self, recordable: RecordableStep, arrays: list[mx.array]) -> None:
        step, given = recordable.step, iter(arrays)
        self._offset = next(given)
        self._offset_after = self._offset + 1
        self._reads: dict[int, tuple[PagedRead, mx.array, mx.array]] = {}
        self._tables = recordable.tables
        far = Progress(FAR_TOKENS)
        rows = [StepRow(row.sequence, far, far.after(1)) for row in step.rows]
        self._step = Step(step.pool, rows, 1, step.layers)  # No sequence takes part in it.
        self._groups = {
            group: _recorded(recordable, group, rows, tables.with_arrays(given))
            for group, tables in recordable.tables.items()
        }
        self._layers: dict[int, RecordableLayer] = {}
        for layer in recordable.layers:
            tables = recordable.tables[layer.group]
            own = [next(given) for _ in layer.recorder.arrays(layer.pages, tables)]
            pages = layer.pages.like(layer.recorder.backend)
            layer.recorder.set_arrays(pages, layer.pages, tables, own)
            self._layers[layer.number] = layer._replace(pages=pages)

    @property
    def written(self) -> list[int]:
        """The layers that have taken the step, in their order."""
        return list(self._reads)

    def offset_of(self, layer: int) -> mx.array:
        """The positions of a layer's next tokens, int32 [B]."""
        return self._offset_after if layer in self._reads else self._offset

    def mask(self, layer: int, *, return_array: bool, window_size: int | None) -> PagedMask | None:
        """The step's mask in a layer, see `PagedKVCache.make_mask`; it cannot be computed.

        Raises:
            NotRecordable: the model asked for an array.
        """
        rows, window = self._step.rows, self._step.pool.windows.get(layer)
        mask = step_mask(rows, 1, window, return_array=return_array, window_size=window_size)
        if not isinstance(mask, PagedMask):
            return None
        stand = PagedMask(placeholder(mask.shape, mx.bool_))
        vars(stand).update(vars(mask))
        return stand

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedValues]:
        """Take the step in one layer; see `Batch.append`.

        Raises:
            NotRecordable: the layer has no pages, has written already, or gets another number of
                tokens.
            ValueError: see `GroupStep.make_placeholders`.
        """
        is_known = layer in self._layers and layer not in self._reads
        if not is_known or keys.shape[::2] != self._step.shape:
            raise NotRecordable(f"layer {layer} does not take one step like the others")
        _, group, pages, _ = self._layers[layer]
        group_step = self._groups[group]
        arrays = group_step.make_placeholders(layer, keys, values)
        pages.write_later(keys, values, group_step.metadata)
        read = _RecordedRead(self._step, group_step, pages, None)
        self._reads[layer] = read, arrays.keys, arrays.values
        return self.read(layer)

    def read(self, layer: int) -> tuple[PagedKeys, PagedValues]:
        """All keys and values of a layer that has taken the step.

        Raises:
            NotRecordable: it has not.
        """
        if layer not in self._reads:
            raise NotRecordable(f"layer {layer} is read before it is written")
        read, keys, values = self._reads[layer]
        paged_keys, paged_values = PagedKeys(keys), PagedValues(values)
        paged_keys.read = paged_values.read = read
        return paged_keys, paged_values

    def changed(self) -> list[mx.array]:
        """What the step has changed, layer by layer, once all of them have taken it."""
        changed = []
        for _, group, pages, recorder in self._layers.values():
            pages.write_back()
            changed += recorder.changed(pages, self._tables[group])
        return changed


class _RecordedRead(PagedRead):
    """A read that attention takes from pages, or not at all."""

    __slots__ = ()

    def attend(self, queries: mx.array, mask: Any, **options: Any) -> mx.array:
        output = super().attend(queries, mask, **options)
        if output is None:
            raise NotRecordable("no kernel takes the mask of its attention")
        return output

    def gather(self) -> tuple[mx.array, mx.array]:
        raise NotRecordable("its own attention gathers keys and values")

    def gather_tokens(self, indices: mx.array, *, of_values: bool) -> mx.array:
        raise NotRecordable("it chooses tokens, which are gathered")


class _AnyBlocks:
    """In the place of a sequence and of its table: a recorded step has its blocks in arrays."""

    def table(self, group: LayerGroup) -> _AnyBlocks:
        return self

    def blocks_of(self, start: int, end: int) -> tuple[int, ...]:
        return (0,) * (-(-end // PAGE_SIZE) - start // PAGE_SIZE)


def _recorded(
    recordable: RecordableStep, group: LayerGroup, rows: list[StepRow], tables: Tables
) -> GroupStep:
    """A group's part of a step whose tables are those."""
    if group.window is not None:
        blocks: Any = _AnyBlocks()  # a ring's are those of the step's own
        rows = [row._replace(sequence=blocks) for row in rows]
    group_step = GroupStep(group, rows, 1, read_first=False)
    metadata = group_step.metadata
    # Pages that it fills are summarised after it, and what it leaves out is counted then.
    metadata.memo.update({TABLES: tables, WRITABLE: True, filled_key(1): []})
    if group.read_tokens is not None:
        metadata.memo[exceeds_key(group.read_tokens)] = recordable.leaves_out(group)
    group_step.has_counted_choice = True
    return group_step
