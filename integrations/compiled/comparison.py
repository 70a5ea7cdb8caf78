"""Decides which steps that repeat a recording are compared with steps that Python takes, and
whether their logits are alike."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

# Beyond this one, comparisons are as far apart as this. A comparison takes a step in Python: one
# for each recording, ten, and then 0.2 % of all steps.
LAST_DOUBLING = 512
# Of the range of a sequence's logits. Another order of sums (the CPU kernels beside plain
# operations, the embedded model, 40 steps) changed them by 1.2e-6, 1.2e-3 and 9.8e-3; deeper models
# sum more.
TOLERANCES = {mx.float32: 2**-13, mx.float16: 2**-6, mx.bfloat16: 2**-4}


class Comparisons:
    """When steps of one kind are compared, and what was found.

    In a model of experts another order of sums may choose another expert once. So a recording is
    wrong only if two comparisons in turn say so.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._is_doubtful = False

    def is_due(self, *, is_first: bool) -> bool:
        """Whether the next step is compared; `is_first` if it is the first one to repeat its
        recording."""
        self._steps += 1
        steps = self._steps
        doubles = steps < LAST_DOUBLING and steps & (steps - 1) == 0
        return is_first or self._is_doubtful or doubles or steps % LAST_DOUBLING == 0

    def is_wrong(self, are_alike: bool) -> bool:
        """Note a comparison; returns whether it is the second in turn with other logits."""
        was_doubtful, self._is_doubtful = self._is_doubtful, not are_alike
        return was_doubtful and not are_alike


def are_alike(repeated: mx.array, python: mx.array, dtypes: Iterable[mx.Dtype]) -> bool:
    """Whether two logits [B, 1, vocabulary] differ by no more than another order of sums explains,
    in a model that computes in these dtypes."""
    tolerance = max(TOLERANCES.get(each, 0.0) for each in (python.dtype, *dtypes))
    one, other = (each.astype(mx.float32) for each in (repeated, python))
    is_same = (one == other) | (mx.isnan(one) & mx.isnan(other))
    difference = mx.where(is_same, 0, mx.abs(one - other)).max(axis=-1)
    is_finite = mx.isfinite(other)
    highest = mx.where(is_finite, other, -mx.inf).max(axis=-1)
    lowest = mx.where(is_finite, other, mx.inf).min(axis=-1)
    return bool(mx.all(difference <= tolerance * (highest - lowest)))
