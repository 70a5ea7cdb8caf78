"""Keeps what the open groups of a layer are computed from: see `AppendedRows`."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, eq=False)
class GroupInputs:
    """The inputs of a sequence's latest tokens, more of them than are in an open group: a trim may
    open an earlier one again.

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
