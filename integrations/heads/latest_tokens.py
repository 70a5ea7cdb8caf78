"""Keeps where a model's hidden states behind the latest tokens of a sequence are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

MOST_UNREAD = 32
"""So many tokens a head may leave unread. A step reads 32 tokens in little more time than one, and
most of it is spent once for 32 steps."""


@dataclass(eq=False)
class TakenStep:
    """A step that a model has taken.

    Attributes:
        tokens: int [N], of all rows.
        hidden: the hidden states behind them, [N, hidden_size].
    """

    tokens: mx.array
    hidden: mx.array


class Place(NamedTuple):
    """Where a token is: in a step, behind so many others."""

    step: TakenStep
    at: int


class LatestTokens:
    """The latest tokens of a sequence, and how many of its tokens a head has read.

    Args:
        length: the tokens that it has already, which are taken as read.
    """

    def __init__(self, length: int) -> None:
        self._read = self._end = length
        self._places: list[Place] = []

    def take(self, start: int, places: Iterable[Place], *, is_read: bool) -> None:
        """Note tokens from position `start` on. Those that were there were trimmed."""
        if start > self._end:  # others have written tokens, or a prefix was found
            self._places.clear()
            self._read = start
        else:
            del self._places[max(0, len(self._places) - (self._end - start)) :]
            self._read = min(self._read, start)
        before = len(self._places)
        self._places += places
        self._end = start + len(self._places) - before
        if is_read:
            self._read = self._end
        del self._places[: -MOST_UNREAD - 1]

    def unread(self, length: int) -> int:
        """How many of the last tokens the head has not read, of a sequence of that length."""
        return max(0, length - self._read) if length <= self._end else 0

    def note_read(self, length: int) -> None:
        """Note that the head has read all tokens of a sequence of that length."""
        self._read = length

    def between(self, start: int, end: int) -> list[Place | None]:
        """The places of the tokens at these positions; None of those that are not known."""
        first = self._end - len(self._places)
        return [
            self._places[at - first] if first <= at < self._end else None
            for at in range(start, end)
        ]
