"""A step that was not written yet, because it is longer than what a ring takes before it is read.

Its queries come later, from this layer or from others that read the same keys, and some of them
still see tokens that writing it would write over. So they attend to the ring as it was and to the
step, and the step is written when the next one comes, or when anything else needs it in pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_kv.kernels.page_rows import PageRows, Tail

if TYPE_CHECKING:
    from paged_kv.sequence import Sequence


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


def keep_pending(layer: int, sequences: list[Sequence], step: Tail, rows: PageRows) -> None:
    """Keep a step of one layer, of which these rows see their parts, until it is written."""
    owned = rows.own_tokens(step[0].shape[2])
    for row, (sequence, own) in enumerate(zip(sequences, owned, strict=True)):
        sequence.pending[layer] = PendingStep(step, row, own)


def pending_tail(layer: int, sequences: list[Sequence]) -> Tail | None:
    """The step that is pending in just these sequences; None if there is none, or if they were
    rearranged since."""
    pending = [sequence.pending.get(layer) for sequence in sequences]
    first = pending[0] if pending else None
    if first is not None and all(
        each is not None and each.step is first.step and each.row == row
        for row, each in enumerate(pending)
    ):
        return first.step
    return None
