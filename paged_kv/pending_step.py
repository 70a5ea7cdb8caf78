"""A step that was not written yet, because it is longer than what a ring takes before it is read.

Its queries come later, from this layer or from others that read the same keys, and some of them
still see tokens that writing it would write over. So they attend to the ring as it was and to the
step, and the step is written when the next one comes, or when anything else needs it in pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_kv.kernels.page_rows import Tail


@dataclass(frozen=True, eq=False)
class PendingStep:
    """One row's part of a step.

    Attributes:
        step: the keys [B, heads, S, k_dim] and values [B, heads, S, v_dim] of all rows.
        row: which of the rows this is.
        own: which of the step's S tokens are the row's own.
    """

    step: Tail
    row: int
    own: range

    def between(self, first: int, last: int) -> Tail:
        """Keys and values [1, heads, last - first, dim] of these of the row's own tokens."""
        begin, end = self.own.start + first, self.own.start + last
        keys, values = (part[self.row : self.row + 1, :, begin:end] for part in self.step)
        return keys, values
