"""Takes the place of a cache that appends rows at rates of its own.

Such a cache keeps arrays [1, rows, dim] itself: a window of the latest tokens, rows that it appends
one for each group of tokens, and what the open group is computed from. A prompt of a length that no
rate divides tells which array is which, without a list of models. Nothing is computed.

The model reads and assigns its arrays by name. Reading gives arrays that stand for the rows in
pages. What it assigns is what it has read with new rows behind, and only these are written:

    cache.rows = mx.concatenate([cache.rows, new], axis=1)
    chosen = rows.reshape(count, dim)[indices]

Each array holds the same numbers as MLX's own result, as a lazy graph, so that models may do
anything else with it. It also knows its pages, so that only chosen rows need be gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import current_thread
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.mlx_lm_internals import let_load
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_kinds import AppendedRows, RowInput
from paged_kv.steps.progress import GroupInputs
from paged_kv.steps.read import GatheredRead
from paged_kv.steps.recognised_arrays import FollowedArray
from paged_kv.steps.sequence import Sequence
from paged_kv.steps.step import Step

# Rates are powers of two, so that no group reaches into the next page.
_RATES = [1 << bits for bits in range(PAGE_SIZE.bit_length())]
_LEFT = 3  # tokens of the last group, by every rate of 4 and more


@dataclass(frozen=True)
class GrowingLayer:
    """What one part of such a cache appends; pages take its place."""

    rows: AppendedRows
    window: int | None = None  # how many of the latest rows a query sees, itself included


def appends_rows(cache: Any) -> bool:
    """Whether a cache has the methods of those that append rows."""
    return hasattr(cache, "update_window") and hasattr(cache, "window_size")


def growing_layers(model: Module, caches: Iterable[Any]) -> list[list[GrowingLayer]]:
    """The parts of each cache of a new prompt cache of a model.

    Raises:
        TypeError: a cache holds something else: it names what.
    """
    found = list(caches)
    if not found or not all(map(appends_rows, found)):
        return []
    longest = max(each.window_size for each in found)
    # More than a window, and more closed groups than an open one has tokens.
    num_tokens = -(-longest // PAGE_SIZE) * PAGE_SIZE + 4 * PAGE_SIZE + _LEFT
    run: Any = model
    run(mx.zeros((1, num_tokens), mx.int32), cache=found)
    return [_parts(each, num_tokens) for each in found]


def _parts(cache: Any, num_tokens: int) -> list[GrowingLayer]:
    """The parts of a cache that has taken so many tokens, its window first."""
    arrays = {name: each for name, each in vars(cache).items() if isinstance(each, mx.array)}
    window = arrays.pop("window")
    dim = window.shape[2]
    parts = [GrowingLayer(AppendedRows("window", 1, dim, window.dtype), cache.window_size)]
    rates = {
        name: rate
        for name, each in arrays.items()
        for rate in _RATES
        if each.shape[1] == num_tokens // rate
    }
    inputs = tuple(
        RowInput(name, each.shape[2], each.dtype)
        for name, each in arrays.items()
        if name not in rates and each.shape[1] in {num_tokens % rate for rate in rates.values()}
    )
    for name, rate in rates.items():
        rows = AppendedRows(name, rate, arrays[name].shape[2], arrays[name].dtype, inputs)
        inputs = ()  # kept once, for the first rows that are made of them
        parts.append(GrowingLayer(rows))
    known = {*rates, *(each.name for part in parts for each in part.rows.inputs)}
    if arrays.keys() - known:
        shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in arrays.items())
        raise TypeError(
            f"{type(cache).__name__} keeps {shapes} after {num_tokens} tokens, and paged_kv does "
            "not know how these grow: use the library's own caches for the model"
        )
    return parts


class GrowingArray(FollowedArray):
    """An array of a cache, [1, count, dim], to which a model appends."""

    note: Callable[[mx.array], None]  # takes what the model appends

    def grown(self, arrays: Any, axis: int) -> None:
        """Note that the model concatenates these arrays, of which this is the first."""
        if len(arrays) == 2 and axis in (1, -2) and not self.is_changed:
            self.note(arrays[1])


class RowArray(GrowingArray):
    """All rows of a sequence, [1, count, dim]."""

    read: GatheredRead  # of their pages
    layout: AppendedRows  # how tokens share a row

    def grown(self, arrays: Any, axis: int) -> None:
        # The cache writes the new rows, and never computes the array of all.
        self.read.leave_unread()
        super().grown(arrays, axis)

    def reshape(self, *shape: Any, **options: Any) -> mx.array:
        reshaped: mx.array = super().reshape(*shape, **options)
        if self.is_changed or reshaped.shape != self.shape[1:]:
            return reshaped
        matrix = RowMatrix(reshaped)
        matrix.read, matrix.layout = self.read, self.layout
        return matrix


class RowMatrix(FollowedArray):
    """The same rows as a matrix [count, dim]."""

    read: GatheredRead
    layout: AppendedRows

    def __getitem__(self, index: Any) -> mx.array:
        is_choice = isinstance(index, mx.array) and index.ndim == 1 and not self.is_changed
        # To gather all is quicker than as many one by one.
        chosen = self._gathered(index) if is_choice and index.size < self.shape[0] else None
        return super().__getitem__(index) if chosen is None else chosen

    def _gathered(self, index: mx.array) -> mx.array | None:
        rate = self.layout.rate
        tokens = index.astype(mx.int32)[:, None] * rate + mx.arange(rate, dtype=mx.int32)
        tokens = tokens.reshape(1, -1).astype(mx.uint32)
        keys = self.read.gather_tokens(tokens, of_values=False)
        values = self.read.gather_tokens(tokens, of_values=True)
        if keys is None or values is None:
            return None
        return self.layout.rows(keys, values)[0]


class LayerRows(CacheList):
    """One layer of one sequence, or of several that the model computes one after the other.

    Args:
        caches: the window's, then those of the layer's rows.
    """

    caches: tuple[PagedKVCache, ...]

    def __init__(self, *caches: PagedKVCache) -> None:
        self._step: Step | None = None
        self._noted: dict[str, mx.array] = {}  # what the model appended, and did not assign yet
        self._assigned: set[str] = set()  # what the model has assigned in the step
        self._early: dict[str, mx.array] = {}  # what it has assigned before the step
        super().__init__(*caches)  # type: ignore[no-untyped-call]  # mlx-lm's

    @property
    def offset(self) -> int | mx.array:
        """The position of the next token."""
        return self.caches[0].offset

    @property
    def window(self) -> mx.array | None:
        """The latest rows [1, count, dim] that the next token's query sees; None before the first.
        What an assigned array depends on is computed no later than the next write."""
        cache = self.caches[0]
        with cache.pool.lock:
            return self._latest(cache.sequences[0].progress(cache.layer).tokens)

    @window.setter
    def window(self, window: mx.array) -> None:
        self.caches[0].keys = window

    def update_window(self, rows: mx.array) -> mx.array:
        """Append rows [1, S, dim] of the next S tokens; returns them behind `window`. All other
        rows of the layer take the step too: their slots are there, empty until rows are assigned.

        Raises:
            ValueError: there are several sequences.
            PoolExhausted: the pool's budget does not hold the tokens.
        """
        cache, *others = self.caches
        if rows.shape[0] != 1 or len(cache.sequences) != 1:
            raise ValueError(
                f"a layer that appends rows takes one sequence at a time, this cache holds "
                f"{len(cache.sequences)} and was given {rows.shape[0]}: call the model itself, "
                "which computes the sequences of a batch one after the other"
            )
        step = cache.batch.begin(cache.layer, rows.shape[1])
        step.begin_in_model()  # A step that a ring has not written yet is written now.
        self._step = step
        self._noted.clear()
        self._assigned.clear()
        with cache.pool.lock:
            before = self._latest(step.rows[0].before.tokens)
            cache.update_and_fetch(*self._layout(cache).shares(rows))
            step.waiting.difference_update([each.layer for each in others])
            for each in others:
                layout = self._layout(each)
                if (early := self._early.pop(layout.name, None)) is not None:
                    self._write_rows(each, layout, early, step)
        return rows if before is None else mx.concatenate([before, rows], axis=1)

    @property
    def nbytes(self) -> int:
        rows = [self._kept_inputs(each) for each in self.caches[0].sequences]
        inputs = [each.nbytes for row in rows for *_, kept in row for each in kept.step]
        return sum(each.nbytes for each in self.caches) + sum(inputs)

    @property  # type: ignore[misc]  # mlx-lm's can be set, and nothing sets it
    def state(self) -> dict[str, Any]:
        """The caches, and per sequence what open groups are computed from, for saving."""
        inputs = [
            [[layer, name, mx.concatenate(list(kept.step), axis=1)] for layer, name, kept in row]
            for row in map(self._kept_inputs, self.caches[0].sequences)
        ]
        return {"caches": [each.state for each in self.caches], "inputs": inputs}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LayerRows:
        """The cache of a `state`, possibly of another process.

        Raises:
            ValueError: no factory of the model is open, which knows what its layers append.
        """
        caches = [PagedKVCache.from_state(each) for each in state["caches"]]
        first = caches[0]
        if not first.pool.rows:
            raise ValueError(
                "the saved cache has layers that append rows: make a PagedCacheFactory of its "
                "model before you load it"
            )
        # Empty lists do not survive the file.
        for sequence, row in zip(first.sequences, state.get("inputs") or [], strict=False):
            for layer, name, inputs in row or []:
                sequence.layers.record_inputs(int(layer), name, inputs)
        return cls(*caches)

    def extract(self, idx: int) -> LayerRows:
        return LayerRows(*[each.extract(idx) for each in self.caches])

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerRows:
        return LayerRows(*copy.deepcopy(self.caches, memo))

    def __getattr__(self, name: str) -> Any:
        for cache, rows, given in self._named(name):
            if given is not None:
                return self._inputs(cache, rows, given)
            early, written = self._early.get(name), self._written_rows(cache, rows)
            if early is None or written is None:
                return written if early is None else early
            return mx.concatenate([mx.array(written), early], axis=1)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        for cache, rows, given in self._named(name):
            new = self._noted.pop(name, value)
            if given is None:
                self._append_rows(cache, rows, new)
            else:
                # What the step adds to open groups.
                cache.sequences[0].layers.record_inputs(cache.layer, name, new)
                self._assigned.add(name)
            return
        super().__setattr__(name, value)

    def _named(self, name: str) -> Iterator[tuple[PagedKVCache, AppendedRows, RowInput | None]]:
        """The rows, or the inputs, of that name."""
        for cache in self.__dict__.get("caches", ())[1:]:
            rows = self._layout(cache)
            if rows.name == name:
                yield cache, rows, None
            yield from ((cache, rows, each) for each in rows.inputs if each.name == name)

    @staticmethod
    def _layout(cache: PagedKVCache) -> AppendedRows:
        return cache.pool.rows[cache.layer]

    def _kept_inputs(self, sequence: Sequence) -> list[tuple[int, str, GroupInputs]]:
        """What this layer's open groups are computed from, by layer of the pool and name."""
        layers = {each.layer for each in self.caches}
        inputs = sequence.layers.inputs
        return [(*key, kept) for key, kept in inputs.items() if key[0] in layers and kept]

    def _latest(self, length: int) -> mx.array | None:
        """The rows that the query of token `length` sees before it."""
        cache = self.caches[0]
        pool, (sequence,), layer = cache.pool, cache.sequences, cache.layer
        count = min(pool.windows[layer].size - 1, length)
        if not count:
            return None
        sequence.write_unwritten({layer})
        base = (length - count) // PAGE_SIZE * PAGE_SIZE
        group = pool.group_of(layer)
        blocks = sequence.table(group).blocks_of(base, length)
        metadata = AttentionMetadata((blocks,), (length - base,), (0,))
        pages = group.pages[layer]
        gathered = pages.gather(metadata)
        pages.lazy_reads.leave(gathered, metadata, current_thread())
        return self._layout(cache).rows(*[each[:, :, -count:] for each in gathered])

    def _written_rows(self, cache: PagedKVCache, rows: AppendedRows) -> RowArray | None:
        """The rows of closed groups in pages; None before the first."""
        count = self._known(cache, rows.name) // rows.rate
        if not count:
            return None
        with cache.pool.lock:
            read = GatheredRead(cache.batch.page_read(cache.layer), counted=False)
        keys, values = [each[:, :, : count * rows.rate] for each in read.gathered]
        array = RowArray(rows.rows(keys, values))
        array.read, array.layout = read, rows
        array.note = partial(self._noted.__setitem__, rows.name)
        return array

    def _append_rows(self, cache: PagedKVCache, rows: AppendedRows, new: mx.array) -> None:
        """Write the rows of the groups that the step closes; those of the next step once it begins:
        a rank has rows of the ranks before it earlier than its own."""
        step = self._open_step
        is_early = step is None or rows.name in self._assigned or not _closed(step, rows)
        if step is None or is_early:
            self._early[rows.name] = new
        else:
            self._write_rows(cache, rows, new, step)

    def _write_rows(
        self, cache: PagedKVCache, rows: AppendedRows, new: mx.array, step: Step
    ) -> None:
        closed, (sequence,) = _closed(step, rows), cache.sequences
        if new.shape != (1, len(closed), rows.dim):
            raise ValueError(
                f"{rows.name} takes {len(closed)} new rows of {rows.dim} numbers in this step, got "
                f"{tuple(new.shape)}: append them with mx.concatenate"
            )
        start, stop = closed.start * rows.rate, closed.stop * rows.rate
        base = start - start % PAGE_SIZE
        with cache.pool.lock, step:
            group = cache.pool.group_of(cache.layer)
            # The step owns the page in which the open group begins, as it writes in it too.
            blocks = sequence.table(group).blocks_of(base, stop)
            pages = group.pages[cache.layer]
            keys, values = rows.shares(new)
            pages.write(keys, values, AttentionMetadata((blocks,), (stop - base,), (0,)))
        self._assigned.add(rows.name)

    def _inputs(self, cache: PagedKVCache, rows: AppendedRows, given: RowInput) -> mx.array:
        """The inputs of the open group, [1, tokens, dim]."""
        count = self._known(cache, given.name) % rows.rate
        kept = cache.sequences[0].layers.inputs.get((cache.layer, given.name))
        if count and kept is not None:
            array = GrowingArray(kept.last(count))
        else:
            array = GrowingArray(mx.zeros((1, 0, given.dim), given.dtype))
        array.note = partial(self._noted.__setitem__, given.name)
        return array

    @property
    def _open_step(self) -> Step | None:
        """The step that `update_window` began, if no other has begun."""
        step = self._step
        if step is None or step is not self.caches[0].batch.step:
            return None
        return step if step.is_open else None

    def _known(self, cache: PagedKVCache, name: str) -> int:
        """The tokens of which a name holds all that there is: in a step, those before it until
        the step's own are assigned."""
        step = self._open_step
        if step is not None and name not in self._assigned:
            return step.rows[0].before.tokens
        return cache.sequences[0].progress(cache.layer).tokens


def _closed(step: Step, rows: AppendedRows) -> range:
    """The numbers of the rows whose groups a step closes."""
    _, before, after = step.rows[0]
    return range(before.tokens // rows.rate, after.tokens // rows.rate)


let_load(LayerRows)
