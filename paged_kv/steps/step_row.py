"""Describes a step in one of its sequences."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

import mlx.core as mx

from paged_kv.steps.progress import NO_PADDING, Padding
from paged_kv.steps.sequence import Sequence


class StepRow(NamedTuple):
    """A step in one sequence.

    Attributes:
        sequence: the sequence.
        before: number of tokens before the step.
        end: number of tokens after the step.
        padding: the padding of later steps, and after the last token.
        offset: the position of the step's first token, which may be padding.
    """

    sequence: Sequence
    before: int
    end: int
    padding: Padding
    offset: int

    @classmethod
    def next(cls, sequence: Sequence, layer: int, count: int) -> StepRow:
        """The step of the next `count` tokens, padding included."""
        tokens, _, padding = sequence.progress(layer)
        return cls.after(sequence, tokens, padding, count)

    @classmethod
    def after(cls, sequence: Sequence, before: int, padding: Padding, count: int) -> StepRow:
        """The step of `count` tokens after the first `before`, with that padding to come."""
        if padding is NO_PADDING:
            return cls(sequence, before, before + count, padding, before)
        offset = before + padding.right - padding.left
        return cls(sequence, before, before + padding.own(count), padding.after(count), offset)

    @classmethod
    def latest(cls, sequence: Sequence, layer: int) -> StepRow:
        """The step that was taken last."""
        progress = sequence.progress(layer)
        end, latest, padding = progress
        return cls(sequence, end - latest, end, padding, progress.offset)


def offset_of(positions: list[int]) -> int | mx.array:
    """The positions of a batch as models take them: a number for one sequence, int32 [B] for
    several."""
    return positions[0] if len(positions) == 1 else mx.array(positions, dtype=mx.int32)


def layers_of_step(sequences: Iterable[Sequence], layer: int, num_layers: int) -> Set[int]:
    """The layers that share the next step of `layer`: those with as many tokens in every
    sequence."""
    layers: Set[int] = frozenset(range(num_layers))
    for sequence in sequences:
        layers &= sequence.layers.level_with(layer)
    return layers
