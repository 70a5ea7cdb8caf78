"""Counts the tokens of the layers of a sequence, and their padding in a batch; and tells how far it
can be rolled back.

mlx-lm's batches are rectangles: shorter prompts are padded, on the right during prefill
(`prepare(lengths=, right_padding=)`, then steps, then `finalize()`), or on the left
(`prepare(left_padding=)`). No page holds padding; only these counts record it.

Not all earlier tokens are held: a ring holds the latest ones, and the inputs of rows that layers
append are kept for a while.

A step longer than `write_chunk` would overwrite tokens that some of its queries still see. Those
queries come later, from this layer or from layers that share its keys. So they attend to the ring
as it was and to the unwritten step. The step is written when the next one comes, or when another
operation needs it in pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from paged_kv.allocator.block_allocator import BlockTable
from paged_kv.allocator.errors import RollbackError
from paged_kv.allocator.prefixes.prefix_node import OutOfWindowBlock
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata, Unwritten
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.layer_kinds import DEFAULT_WRITE_CHUNK, Window
from paged_kv.pool.page_pool import PagePool


@dataclass(frozen=True)
class Padding:
    """The padding of one sequence in one layer.

    Attributes:
        left: padding still to come before the sequence's next token.
        tokens: valid tokens still to come before padding follows; None if no end was announced.
        right: padding that has followed the sequence's last token.
        to_trim: written tokens to trim as padding at the end: their number was announced, but not
            their start.
    """

    left: int = 0
    tokens: int | None = None
    right: int = 0
    to_trim: int = 0

    @property
    def is_none(self) -> bool:
        """Whether the coming steps have no padding."""
        return not self.left and self.tokens is None

    def own(self, count: int) -> int:
        """How many of the next `count` tokens are valid."""
        behind_left = max(0, count - self.left)
        return behind_left if self.tokens is None else min(behind_left, self.tokens)

    def after(self, count: int) -> Padding:
        """The padding after `count` more tokens."""
        if self.is_none:
            return self
        own, left = self.own(count), min(self.left, count)
        return Padding(
            left=self.left - left,
            tokens=None if self.tokens is None else self.tokens - own,
            right=self.right + count - left - own,
            to_trim=self.to_trim,
        )


NO_PADDING = Padding()


class Progress(NamedTuple):
    """How far one layer of a sequence is: its tokens, those of them in the latest step, or 0 once
    no query can attend to it, and the padding of the coming steps and of the latest one."""

    tokens: int = 0
    latest: int = 0
    padding: Padding = NO_PADDING

    @property
    def offset(self) -> int:
        """The position of the next token; negative if that token is padding."""
        return self.tokens + self.padding.right - self.padding.left

    def after(self, count: int) -> Progress:
        """The progress after a step of `count` tokens, padding included."""
        tokens, _, padding = self
        if padding is NO_PADDING:
            return Progress(tokens + count, count, padding)
        own = padding.own(count)
        return Progress(tokens + own, own, padding.after(count))


class StepProgress(NamedTuple):
    """A step that goes from layer to layer: the layers that take it, those of them that have not
    taken it yet, a set that the step changes, and how far the others are."""

    layers: Set[int]
    waiting: Set[int]
    after: Progress


@dataclass(eq=False)
class UnwrittenStep:
    """The part of a step of the `row`-th sequence of a batch.

    Attributes:
        step: the keys [B, heads, S, k_dim] and values [B, heads, S, v_dim] of the batch.
        own: which of the step's S tokens are valid for the sequence.
        has_filled: whether the pages that are cached out of window have got their tokens. A write
            to the ring that failed may have overwritten those that were in it.
    """

    step: Unwritten
    row: int
    own: range
    has_filled: bool = False

    def between(self, first: int, last: int) -> Unwritten:
        """Keys and values [1, heads, last - first, dim] of the valid tokens [first, last)."""
        begin, end = self.own.start + first, self.own.start + last
        keys, values = (part[self.row : self.row + 1, :, begin:end] for part in self.step)
        return keys, values

    def write_to_ring(
        self,
        pages: LayerPages,
        window: Window,
        table: BlockTable,
        out_of_window: Mapping[int, OutOfWindowBlock],
        end: int,
    ) -> None:
        """Write it in one layer, where it ends at `end`: first the pages that are cached out of
        window, which never were in the ring or were cached before this, then its last tokens into
        the ring."""
        start = end - len(self.own)
        for page, cached in out_of_window.items():
            base, last = page * PAGE_SIZE, (page + 1) * PAGE_SIZE
            if self.has_filled or cached.block is None or last <= start or base >= end:
                continue
            first = max(base, start)
            if first > base:
                (in_ring,) = table.blocks_of(base, first)
                pages.copy({in_ring: cached.block})
            keys, values = self.between(first - start, last - start)
            pages.write(keys, values, AttentionMetadata(((cached.block,),), (last - base,), (0,)))
        self.has_filled = True
        for first, last in window.kept_parts(start, end):
            base = first - first % PAGE_SIZE
            blocks = table.blocks_of(base, last)
            keys, values = self.between(first - start, last - start)
            pages.write(keys, values, AttentionMetadata((blocks,), (last - base,), (0,)))


@dataclass(frozen=True, eq=False)
class GroupInputs:
    """The inputs of a sequence's latest tokens, which rows of an open group are computed from: see
    `AppendedRows`. They are more than are in the group: a trim may open an earlier one again.

    Attributes:
        step: the tokens' inputs, in order, each array [1, tokens, dim].
    """

    step: tuple[mx.array, ...] = ()

    def __len__(self) -> int:
        return sum(each.shape[1] for each in self.step)

    def followed_by(self, inputs: mx.array, most: int) -> GroupInputs:
        """These and those of the next tokens, the last `most` of them or a few more."""
        known, steps = inputs.shape[1], [inputs[:, -most:]]
        for each in reversed(self.step):
            if known >= most:
                break
            steps.append(each)
            known += each.shape[1]
        return GroupInputs(tuple(reversed(steps)))

    def without_last(self, count: int) -> GroupInputs:
        """These but for those of the last `count` tokens."""
        steps = list(self.step)
        while count and steps:
            last = steps.pop()
            if last.shape[1] > count:
                steps.append(last[:, :-count])
                break
            count -= last.shape[1]
        return GroupInputs(tuple(steps))

    def last(self, count: int) -> mx.array:
        """Those of the last `count` tokens, at least 1, [1, count, dim]."""
        known = 0
        for index, each in enumerate(reversed(self.step), 1):
            known += each.shape[1]
            if known >= count:
                steps = list(self.step[-index:])
                return (mx.concatenate(steps, axis=1) if index > 1 else steps[0])[:, -count:]
        raise AssertionError(f"the inputs of {count} tokens were asked for, {known} are kept")


class LayerProgress:
    """How far the layers of a sequence are, and how far they can be rolled back.

    `trimmed` and `inputs` never change in place: an undo and forks need the former ones.

    Attributes:
        settled: the progress of each layer, without the step.
        step: the step that layers may have taken since; None if there is none.
        states_len: the sequence's tokens, if no layer has pages.
        trimmed: by group with a window, the most tokens that any layer had before a trim: the ring
            has overwritten tokens too far before so many.
        inputs: of layers that append rows, what open groups are computed from, by layer and name.
    """

    __slots__ = ("inputs", "pool", "settled", "states_len", "step", "trimmed")

    def __init__(self, pool: PagePool, settled: list[Progress]) -> None:
        self.pool = pool
        self.settled = settled
        self.step: StepProgress | None = None
        self.states_len = 0
        self.trimmed: Mapping[LayerGroup, int] = {}
        self.inputs: Mapping[tuple[int, str], GroupInputs] = {}

    @property
    def length(self) -> int:
        """The tokens of the layer that has most; without such layers, of the states."""
        return self.longest() if self.settled else self.states_len

    def of(self, layer: int) -> Progress:
        step = self.step
        if step is not None and layer in step.layers and layer not in step.waiting:
            return step.after
        return self.settled[layer]

    def longest(self, layers: Iterable[int] | None = None) -> int:
        """The tokens of the layer that has most, of all or of `layers`."""
        step, num_layers = self.step, len(self.settled)
        if step is not None and not step.waiting and len(step.layers) == num_layers:
            return step.after.tokens  # all have taken it
        layers = range(num_layers) if layers is None else layers
        return max([self.of(layer).tokens for layer in layers])

    def level_with(self, layer: int) -> Set[int]:
        """The layers that take the same step next as this one does."""
        places = [(each.tokens, each.padding) for each in map(self.of, range(len(self.settled)))]
        return frozenset([at for at, place in enumerate(places) if place == places[layer]])

    def set(self, layer: int, progress: Progress) -> None:
        self.settle()
        self.settled[layer] = progress

    def settle(self) -> None:
        """End the step: layers that wait stay where they are."""
        step, self.step = self.step, None
        if step is not None:
            for layer in step.layers - step.waiting:
                self.settled[layer] = step.after

    def written(self, group: LayerGroup) -> int:
        """The most tokens that any layer of a group with a window ever had."""
        return max(self.trimmed.get(group, 0), self.longest(group.layers))

    def record_trim(self, group: LayerGroup, tokens: int) -> None:
        """Record that a layer of a group which had so many tokens was trimmed."""
        if group.window is not None and tokens > self.trimmed.get(group, 0):
            self.trimmed = {**self.trimmed, group: tokens}

    def record_inputs(self, layer: int, name: str, inputs: mx.array) -> None:
        """Keep what a step adds to open groups, for as many tokens as rings can roll back."""
        chunks = [window.write_chunk for window in self.pool.windows.values()]
        most = self.pool.rows[layer].rate + min(chunks, default=DEFAULT_WRITE_CHUNK)
        kept = self.inputs.get((layer, name), GroupInputs()).followed_by(inputs, most)
        self.pool.unwritten.add(kept)
        self.inputs = {**self.inputs, (layer, name): kept}

    def drop_inputs(self, layer: int, count: int) -> None:
        """Keep the inputs of a layer's last `count` tokens no longer."""
        self.inputs = {
            key: inputs.without_last(count) if key[0] == layer else inputs
            for key, inputs in self.inputs.items()
        }

    def most_to_trim(self) -> int:
        windows, rows, length = self.pool.windows, self.pool.rows, self.length
        in_rings = [self.of(each).tokens - self._shortest_of_ring(each) for each in windows]
        in_rows = [length - self._shortest_of_rows(each) for each in rows]
        return max(0, min([length, *in_rings, *in_rows]))

    def require_rollback(self, layer: int, count: int) -> None:
        """Require that the last `count` tokens of a layer can be trimmed.

        Raises:
            RollbackError: the ring of this or another layer has overwritten tokens that would be
                needed, or inputs that would be needed are not kept.
        """
        target = max(0, self.of(layer).tokens - count)
        for other in self.pool.windows:
            if target < min(self._shortest_of_ring(other), self.of(other).tokens):
                raise RollbackError(count, self.most_to_trim())
        for other, rows in self.pool.rows.items():
            if target % rows.rate and target < self._shortest_of_rows(other):
                raise RollbackError(count, self.most_to_trim())

    def _shortest_of_ring(self, layer: int) -> int:
        """The shortest length to which a layer with a window can be trimmed."""
        written = self.written(self.pool.group_of(layer))
        return self.pool.windows[layer].shortest_rollback(written)

    def _shortest_of_rows(self, layer: int) -> int:
        """The shortest length to which a layer that appends rows can be trimmed wherever its group
        is open."""
        rows, length = self.pool.rows[layer], self.of(layer).tokens
        kept = [len(self.inputs.get((layer, each.name), ())) for each in rows.inputs]
        first = length - min(kept, default=length)
        return -(-first // rows.rate) * rows.rate
