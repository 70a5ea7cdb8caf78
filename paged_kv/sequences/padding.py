"""What of a batch's steps is padding, in one row.

mlx-lm's batches are rectangles: shorter prompts are padded, on the right while prompts are read
(`prepare(lengths=, right_padding=)`, then steps, then `finalize()`), or on the left
(`prepare(left_padding=)`). No page holds padding; only these counts remember it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Padding:
    """The padding of one row in one layer.

    Attributes:
        left: padding still to come before the row's next token.
        tokens: tokens still to come before padding follows; None if no end was announced.
        right: padding that has followed the row's last token.
        to_trim: tokens at the end that will turn out to be padding: it was announced how many
            they are, and not where they begin.
    """

    left: int = 0
    tokens: int | None = None
    right: int = 0
    to_trim: int = 0

    @property
    def is_none(self) -> bool:
        """Whether all steps to come are a row's own."""
        return not self.left and self.tokens is None

    def own(self, count: int) -> int:
        """How many of the next `count` tokens are the row's own."""
        behind_left = max(0, count - self.left)
        return behind_left if self.tokens is None else min(behind_left, self.tokens)

    def after(self, count: int) -> Padding:
        """What is left when `count` more tokens have come."""
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
