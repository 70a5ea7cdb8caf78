"""Keeps where a model's hidden states behind the latest tokens of a sequence are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import mlx.core as mx

from paged_kv.steps.progress import Padding

MOST_UNREAD = 32
"""So many tokens a head may leave unread. A step reads 32 tokens in little more time than one, and
most of it is spent once for 32 steps."""


@dataclass(eq=False)
class TakenStep:
    """Tokens of a step that a model has taken.

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

    def copy(self) -> LatestTokens:
        """Of a fork."""
        copy = LatestTokens(self._end)
        copy._read, copy._places = self._read, list(self._places)
        return copy

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


def places_of_step(
    tokens: mx.array | None, hidden: mx.array, paddings: list[Padding]
) -> tuple[TakenStep, list[list[Place]]]:
    """What is kept of a step, and where the tokens of each row are there; of a long step only the
    last ones, as no draft is that long.

    Args:
        tokens: [B, S]; None if they are not known.
        hidden: the states behind them, [B, S, hidden_size].
        paddings: of the rows, before the step.
    """
    rows, count, width = hidden.shape
    if tokens is None:
        tokens = mx.zeros((rows, count), mx.int32)
    own = [padding.own(count) for padding in paddings]
    if count <= MOST_UNREAD:
        step = TakenStep(tokens.reshape(-1), hidden.reshape(-1, width))
        firsts = [row * count + padding.left for row, padding in enumerate(paddings)]
        return step, [
            [Place(step, first + at) for at in range(of_row)]
            for first, of_row in zip(firsts, own, strict=True)
        ]
    ends = [padding.left + of_row for padding, of_row in zip(paddings, own, strict=True)]
    last = mx.array([max(0, end - 1) for end in ends])[:, None, None]
    step = TakenStep(
        mx.take_along_axis(tokens, last[:, :, 0], axis=1).reshape(-1),
        mx.take_along_axis(hidden, last, axis=1).reshape(-1, width),
    )
    return step, [[Place(step, row)] if of_row else [] for row, of_row in enumerate(own)]


def gathered(
    places: list[list[Place | None]], nothing: TakenStep, name: Literal["tokens", "hidden"]
) -> mx.array:
    """The tokens [B, S], or the hidden states [B, S, hidden_size], at these places, S of the
    longest row; `nothing`, a step of one token, has what is where nothing is known."""
    firsts, total = {nothing: 0}, 1
    for place in chain.from_iterable(places):
        if place is not None and place.step not in firsts:
            firsts[place.step] = total
            total += len(place.step.tokens)
    longest = max(map(len, places))
    numbers = [
        [0 if each is None else firsts[each.step] + each.at for each in row]
        + [0] * (longest - len(row))
        for row in places
    ]
    arrays: list[mx.array] = [getattr(step, name) for step in firsts]
    return mx.concatenate(arrays)[mx.array(numbers)]
