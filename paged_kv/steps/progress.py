"""Counts the tokens of one layer of a sequence, and its padding in a batch.

mlx-lm's batches are rectangles: shorter prompts are padded, on the right during prefill
(`prepare(lengths=, right_padding=)`, then steps, then `finalize()`), or on the left
(`prepare(left_padding=)`). No page holds padding; only these counts record it.
"""

from __future__ import annotations

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

    def is_level_with(self, other: Progress) -> bool:
        """Whether both take the same step next."""
        return (self.tokens, self.padding) == (other.tokens, other.padding)
