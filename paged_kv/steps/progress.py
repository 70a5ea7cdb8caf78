"""Counts the tokens of the layers of a sequence, and their padding in a batch.

mlx-lm's batches are rectangles: shorter prompts are padded, on the right during prefill
(`prepare(lengths=, right_padding=)`, then steps, then `finalize()`), or on the left
(`prepare(left_padding=)`). No page holds padding; only these counts record it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import NamedTuple


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
    """How far one layer of a sequence is.

    Attributes:
        tokens: the number of its tokens.
        latest: tokens of the latest step; 0 once no query can attend to it.
        padding: the padding of the coming steps, and that of the latest one.
    """

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
    """A step that goes from layer to layer.

    Attributes:
        layers: those that take it.
        waiting: those of them that have not taken it yet. The step changes it.
        after: how far the others are.
    """

    layers: Set[int]
    waiting: Set[int]
    after: Progress


class LayerProgress:
    """How far the layers of a sequence are.

    Attributes:
        settled: the progress of each layer, without the step.
        step: the step that layers may have taken since; None if there is none.
    """

    __slots__ = ("settled", "step")

    def __init__(self, settled: list[Progress]) -> None:
        self.settled = settled
        self.step: StepProgress | None = None

    def of(self, layer: int) -> Progress:
        """The progress of one layer."""
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
        """Change how far one layer is."""
        self.settle()
        self.settled[layer] = progress

    def settle(self) -> None:
        """End the step: layers that wait stay where they are."""
        step, self.step = self.step, None
        if step is not None:
            for layer in step.layers - step.waiting:
                self.settled[layer] = step.after
