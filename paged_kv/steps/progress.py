"""Counts the tokens of the layers of a sequence, and their padding in a batch.

mlx-lm's batches are rectangles: shorter prompts are padded, on the right during prefill
(`prepare(lengths=, right_padding=)`, then steps, then `finalize()`), or on the left
(`prepare(left_padding=)`). No page holds padding; only these counts record it.
"""

from __future__ import annotations

from collections import Counter
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

    def is_level_with(self, other: Progress) -> bool:
        """Whether both take the same step next."""
        return (self.tokens, self.padding) == (other.tokens, other.padding)


class LayerProgress:
    """How far the layers of a sequence are: most have the same progress, so only the others are
    listed.

    Attributes:
        most: the progress of most layers.
        others: that of the layers that differ. A step notes here each layer that has taken it.
    """

    __slots__ = ("most", "num_layers", "others")

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.most = Progress()
        self.others: dict[int, Progress] = {}

    def of(self, layer: int) -> Progress:
        """The progress of one layer."""
        return self.others.get(layer, self.most)

    def longest(self, layers: Iterable[int] | None = None) -> int:
        """The tokens of the layer that has most, of all or of `layers`."""
        if layers is None:
            return max(self.most.tokens, *[each.tokens for each in self.others.values()], 0)
        return max([self.of(layer).tokens for layer in layers])

    def level_with(self, layer: int) -> Set[int]:
        """The layers that take the same step next as this one does."""
        mine, layers = self.of(layer), range(self.num_layers)
        if all(mine.is_level_with(other) for other in (self.most, *self.others.values())):
            return frozenset(layers)
        return {other for other in layers if mine.is_level_with(self.of(other))}

    def set(self, layer: int, progress: Progress) -> None:
        """Change how far one layer is."""
        self.others[layer] = progress
        self.fold()

    def fold(self) -> None:
        """List only layers that differ from most; at least one is listed now."""
        found, count = list(self.others.values()), self.num_layers
        if found.count(found[0]) == count:  # the usual end of a step
            self.most, self.others = found[0], {}
            return
        if 2 * len(found) > count:
            layers = {layer: self.of(layer) for layer in range(count)}
            self.most, self.others = Counter(layers.values()).most_common(1)[0][0], layers
        self.others = {at: each for at, each in self.others.items() if each != self.most}

    def without_latest(self) -> LayerProgress:
        """The same tokens, whose latest step no query can attend to."""
        copy = LayerProgress(self.num_layers)
        copy.most = self.most._replace(latest=0)
        copy.others = {at: each._replace(latest=0) for at, each in self.others.items()}
        return copy
