"""What a step is in one of its sequences."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

from paged_kv.sequences.padding import Padding
from paged_kv.sequences.sequence import Sequence


class StepRow(NamedTuple):
    """A step in one row.

    Attributes:
        sequence: whose row it is.
        before: tokens that the step's first one has before it.
        end: tokens with those of the step.
        padding: what of later steps is padding, and how much follows the last token.
        offset: the position of the step's first token, maybe one of padding.
    """

    sequence: Sequence
    before: int
    end: int
    padding: Padding
    offset: int

    @classmethod
    def next(cls, sequence: Sequence, layer: int, count: int) -> StepRow:
        """The next `count` tokens, padding included."""
        before, padding = sequence.progress(layer)
        offset = before + padding.right - padding.left
        return cls(sequence, before, before + padding.own(count), padding.after(count), offset)

    @classmethod
    def latest(cls, sequence: Sequence, layer: int) -> StepRow:
        """The latest step, which was taken already."""
        end, offset = sequence.context_lens[layer], sequence.offset(layer)
        return cls(sequence, end - sequence.step_lens[layer], end, sequence.padding[layer], offset)

    @property
    def offset_after(self) -> int:
        """The position of the next step's first token."""
        return self.end + self.padding.right - self.padding.left


def layers_as_far(sequences: Iterable[Sequence], layer: int, num_layers: int) -> Set[int]:
    """The layers whose next step is the same as that of one of them, in all sequences."""
    layers: Set[int] = frozenset(range(num_layers))
    for sequence in sequences:
        if not sequence.is_even:
            mine = sequence.progress(layer)
            layers = {other for other in layers if sequence.progress(other) == mine}
    return layers
