"""Lets the layers of a prompt cache share the steps of their sequences.

mlx-lm calls the cache of each layer separately. The first layer that takes a step begins it here,
and the others find it here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Set
from functools import partial
from typing import Any

import mlx.core as mx

from paged_kv.allocator.block_allocator import BlockTable
from paged_kv.checks import counted
from paged_kv.kernels.pages.attention_metadata import Unwritten
from paged_kv.kernels.pages.page_format import PageFormat
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.blocks import common_len
from paged_kv.steps.progress import Progress
from paged_kv.steps.read import PagedKeys, PagedRead, PagedValues, gathered_arrays
from paged_kv.steps.sequence import LayerwiseSequences, Sequence, StepRow
from paged_kv.steps.step import Step


class Batch:
    """Sequences of one pool that take their steps together. `Batch.of` makes batches. The latest
    `step` may be closed."""

    def __init__(self, pool: PagePool, sequences: tuple[Sequence, ...]) -> None:
        self.pool = pool
        self.sequences = sequences
        self.step: Step | None = None
        self._narrower: Batch | None = None
        self._wider: weakref.ref[Batch] | None = None
        self._newcomers = LayerwiseSequences()

    @classmethod
    def of(cls, pool: PagePool, sequences: Iterable[Sequence]) -> Batch:
        """The batch of these sequences. While it exists, all callers get the same one: so each
        layer's cache finds it by itself, after operations like `filter` too."""
        rows = tuple(sequences)
        with pool.lock:
            batch = _batches.get((pool, rows))
            if batch is None:
                batch = _batches[pool, rows] = cls(pool, rows)
            return batch

    def widened(self, count: int) -> Batch:
        """The batch of this one's sequence and new ones, `count` in all: the same one for all
        layers."""
        wider = None if self._wider is None else self._wider()
        if wider is None or len(wider.sequences) != count:
            (first,) = self.sequences
            others = [Sequence(self.pool, first.page_format) for _ in range(count - 1)]
            for other in others:
                other.hooks = first.hooks
            wider = Batch.of(self.pool, [first, *others])
            wider._narrower = self
            self._wider = weakref.ref(wider)
        return wider

    def narrowed(self) -> Batch:
        """The batch that this one was widened from, if it has neither tokens nor padding; else
        itself."""
        layers = [each for sequence in self.sequences for each in sequence.layers.settled]
        is_new = all(each == Progress() for each in layers)
        return self._narrower if is_new and self._narrower is not None else self

    def take_in(self, layer: int, cache: Any) -> list[Sequence]:
        """New sequences, which hold in a layer what a cache without pages holds, such as mlx-lm's
        `KVCache`: all layers get the same ones.

        The cache has keys [B, k_heads, T, k_dim] and values [B, v_heads, T, v_dim], or None before
        the first token, an `offset` for each sequence, and the `left_padding` of a batch.

        Raises:
            ValueError: it has no such arrays, its arrays do not fit the layer, or its first tokens
                are not in them any more.
            PoolExhausted: the pool's budget does not hold the tokens.
        """
        contents = list(_contents_by_sequence(cache))
        with self.pool.lock:
            sequences = self._newcomers.get(layer, len(contents), partial(Sequence, self.pool))
        for sequence, (keys, values) in zip(sequences, contents, strict=True):
            if keys.shape[2]:
                written, _ = Batch.of(self.pool, [sequence]).append(layer, keys, values)
                written.read.leave_unread()
        return sequences

    def begin(self, layer: int, count: int) -> Step:
        """The step of each sequence's next `count` tokens, padding included, in one layer: the one
        that other layers have begun, or else a new one, which all layers with as many tokens take.
        That closes any other step of these sequences."""
        step = self.step
        if step is None or not step.is_open:
            return self._begin(layer, count)
        if layer in step.waiting and step.shape[1] == count:
            return step
        if step.waiting or len(step.layers) < self.pool.num_layers:
            return self._begin(layer, count)
        # All layers have taken it, and take the next one too.
        with self.pool.lock:
            rows = [StepRow(each, now, now.after(count)) for each, _, now in step.rows]
            self.step = Step(self.pool, rows, count, step.layers).begin()
            return self.step

    def append(self, layer: int, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedValues]:
        """Write the valid tokens of a step of S tokens to pages, in one layer; returns as `read`.

        keys [B, k_heads, S, k_dim], values [B, v_heads, S, v_dim], B the number of sequences.

        Each error also undoes the writes of other layers in the same step.

        Raises:
            ValueError: shapes or dtypes do not fit this layer or a page format.
            PoolExhausted: the budget does not hold the blocks.
            ThreadConflict: another thread has not yet computed its reads of these pages.
        """
        batch, count = keys.shape[::2]
        if batch != len(self.sequences):
            raise ValueError(
                f"layer {layer} holds {counted(len(self.sequences), 'sequence')}, got a batch of "
                f"{batch}"
            )
        if count == 0:
            return self.read(layer)
        return write(self.begin(layer, count), layer, keys, values)

    def read(self, layer: int, *, counted: bool = True) -> tuple[PagedKeys, PagedValues]:
        """All keys and values of the sequences in one layer; see `GatheredRead`.

        Raises:
            ValueError: the layer has not been written yet.
        """
        with self.pool.lock:
            return gathered_arrays(self.page_read(layer), counted=counted)

    def page_read(self, layer: int) -> PagedRead:
        """As `read`, as pages."""
        pool, step = self.pool, self.step
        with pool.lock:
            if layer not in pool.group_of(layer).pages:
                raise ValueError(f"layer {layer} has no keys and values yet: nothing was written")
            unwritten = _unwritten_step(layer, self.sequences)
            if step is None or not step.is_open or layer not in step.layers - step.waiting:
                if unwritten is None:
                    for sequence in self.sequences:
                        sequence.commit({layer})
                rows = [sequence.latest_step(layer) for sequence in self.sequences]
                step = self.step = Step(pool, rows, 0, {layer}).begin()
            group_step = step.group_step(layer, read_first=unwritten is not None)
            group_step.follow_moves()
            return PagedRead(step, group_step, group_step.group.pages[layer], unwritten)

    def convert(self, page_format: PageFormat) -> None:
        """Convert all full pages of the sequences to a format, but for those of rings, and first
        ones to `PageFormat.first` of it; later ones get it too, once they are full. Other sequences
        that share the pages keep them unchanged.

        O(1) for a sequence that was converted before. Memory holds the pages of one slab at a time
        in both formats.

        Raises:
            ValueError: the format cannot hold a layer's keys and values; nothing was changed.
            PoolExhausted: the budget does not hold the new pages of a slab beside the old ones.
                Converted pages stay converted, and another call resumes.
        """
        pool = self.pool
        with pool.lock:
            others = [
                each
                for each in self.sequences
                if each.page_format != page_format or each.is_converting
            ]
            if not others:
                return
            open_groups = [group for group in pool.groups if group.is_open and group.window is None]
            for group in open_groups:
                group.add_formats(page_format, page_format.first)
            for sequence in others:
                sequence.commit()
            for sequence in others:
                sequence.begin_conversion(page_format)
            for group in open_groups:
                for each in dict.fromkeys((page_format, page_format.first)):
                    full = partial(_full_blocks, others, group, each.name)
                    group.convert(full, each, pool.reclaimer.make_room)
            for sequence in others:
                sequence.is_converting = False

    def _begin(self, layer: int, count: int) -> Step:
        with self.pool.lock:
            layers: Set[int] = frozenset(range(self.pool.num_layers))
            for sequence in self.sequences:
                layers &= sequence.layers.level_with(layer)
            rows = [sequence.next_step(layer, count) for sequence in self.sequences]
            self.step = Step(self.pool, rows, count, layers).begin()
            return self.step


# A key holds its sequences only as long as there is the batch, which holds them too.
_batches: weakref.WeakValueDictionary[tuple[PagePool, tuple[Sequence, ...]], Batch] = (
    weakref.WeakValueDictionary()
)


def write(
    step: Step, layer: int, keys: mx.array, values: mx.array
) -> tuple[PagedKeys, PagedValues]:
    """Write a step that waits for a layer; see `Batch.append`."""
    with step.pool.lock, step:
        group_step, pages, arrays = step.before_write(layer, keys, values)
        if group_step.needs_step:
            group_step.write_apart(layer, pages, (keys, values))
            read = PagedRead(step, group_step, pages, (keys, values))
        else:
            pages.write_later(keys, values, group_step.metadata)
            read = PagedRead(step, group_step, pages, None)
        if layer not in step.attending:
            return gathered_arrays(read)
        step.is_unread = step.pool.attends_in_order
    paged_keys, paged_values = PagedKeys(arrays.keys), PagedValues(arrays.values)
    paged_keys.read = paged_values.read = read
    return paged_keys, paged_values


def _contents_by_sequence(cache: Any) -> Iterator[tuple[mx.array, mx.array]]:
    """The keys and values [1, heads, tokens, dim] of each sequence of a cache without pages."""
    kind = type(cache).__name__
    keys, values = getattr(cache, "keys", ()), getattr(cache, "values", ())
    rows = 1 if keys is None else len(keys)
    begins = integers(getattr(cache, "left_padding", [0] * rows))
    if keys is None and not any(begins):
        keys = values = mx.zeros((len(begins), 1, 0, 1))
    if not (isinstance(keys, mx.array) and isinstance(values, mx.array)):
        raise ValueError(
            f"a PagedKVCache can be batched with caches that have arrays of keys and values, as a "
            f"KVCache has, got a {kind}: make its cache with the factory's make_cache()"
        )
    offset = cache.offset
    counts = integers(offset) if isinstance(offset, mx.array) else [offset] * len(begins)
    for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        end = begin + count
        if begin < 0 or end > keys.shape[2]:
            raise ValueError(
                f"a PagedKVCache needs all tokens of a cache that it is batched with, got a {kind} "
                f"with the latest {keys.shape[2]} of {count}: compute its prompt with the "
                "factory's make_cache()"
            )
        yield keys[row : row + 1, :, begin:end], values[row : row + 1, :, begin:end]


def integers(numbers: Iterable[int] | mx.array) -> list[int]:
    """The numbers as a list, of a list or of an array, as mlx-lm gives them."""
    listed: Any = numbers.tolist() if isinstance(numbers, mx.array) else numbers
    return list(listed)


def _full_blocks(
    sequences: list[Sequence], group: LayerGroup, name: str
) -> dict[BlockTable, list[int]]:
    """The full blocks of each table that get that format."""
    found = {}
    for sequence in sequences:
        table = sequence.table(group)
        blocks = table.full_blocks(common_len(sequence, group))
        found[table] = [
            block for page, block in enumerate(blocks) if table.full_format(page) == name
        ]
    return found


def _unwritten_step(layer: int, sequences: Iterable[Sequence]) -> Unwritten | None:
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
