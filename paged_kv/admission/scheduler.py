"""Decides before each step which sequences run, in their order: that of their priorities, if they
have any, and of their arrival.

A sequence is named by its number, which counts arrivals. The line of waiting sequences is sorted by
that order, so a preempted sequence, which came before those that have never run, is at the head of
those of its priority.

    begins      the head of the line, while there is room for it and a place
    preempted   the last of the running sequences, while the next step of all does not fit; and
                those of worse priorities than the head of the line, if that makes room for it

The first running sequence is never preempted for those behind it, so it ends at some time, and the
next one becomes the first: no sequence waits for ever while none of a better priority comes. It is
preempted only for sequences that cannot be: these end, and it is the next to begin. A sequence that
has come back is spared until it has generated a token, while there is another one to preempt.

This knows no model and no arrays. What it asks and commands is a `Runner`, so several machines can
follow the decisions of one.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Set
from typing import Any, Protocol


class Runner(Protocol):
    """Runs the sequences that a `Scheduler` chooses."""

    def reserve(self, running: list[int]) -> bool:
        """Reserve memory for the next step of these sequences; false if the pool does not hold it,
        after eviction and requantisation."""
        ...

    def preempt(self, number: int) -> None:
        """Take a sequence out of the batch, and cache its pages for its return."""
        ...

    def awaits(self, number: int, running: list[int]) -> bool:
        """Whether it is not a waiting sequence's turn, or a running one computes what both begin
        with; others may begin before it until then."""
        ...

    def has_room(self, number: int, running: list[int]) -> bool:
        """Whether a waiting sequence may begin beside the running ones."""
        ...

    def would_have_room(self, number: int, running: list[int], victims: list[int]) -> bool:
        """Whether it could if these were preempted."""
        ...

    def begin(self, number: int) -> bool:
        """Let a waiting sequence run, and reserve memory for its first step; false, and no effect,
        if the pool does not hold it."""
        ...


# Sequences that may begin before others in the line, which await what a running one computes.
HEAD = 8


class Scheduler:
    """Chooses the sequences of each step.

    Args:
        runner: runs them.
        order: what sequences are sorted by: their priority, the lowest of which comes first, and
            their arrival.

    Attributes:
        preemptions: how often a sequence was preempted.
    """

    def __init__(self, runner: Runner, order: Callable[[int], tuple[int, Any]]) -> None:
        self._runner = runner
        self._order = order
        self._preempted: set[int] = set()
        self._returned: set[int] = set()
        self.preemptions = 0

    def schedule(
        self,
        running: list[int],
        waiting: list[int],
        places: int,
        fixed: Set[int] = frozenset(),
    ) -> bool:
        """Choose the sequences of the next step: moves numbers between these lists. `running` is
        sorted, and of `waiting` the first may begin first. `places` is the number of sequences that
        may begin, and `fixed` those that cannot be preempted. False if memory does not hold the
        next step of the first and of these.

        O(running sequences) if nothing is preempted and nothing waits.
        """
        self._forget_ended(running, waiting)
        while not self._runner.reserve(running):
            victim = self._victim(running, fixed)
            if victim is None:
                return False
            self._preempt(victim, running)
            waiting.insert(0, victim)
        while waiting and places > 0:
            preempted = self.preemptions
            number = self._next(running, waiting)
            if number is None or not self._begin(number, running, waiting, fixed):
                break
            waiting.remove(number)
            insort(running, number, key=self._order)
            places += self.preemptions - preempted - 1
        return bool(running) or not waiting or places <= 0

    def _preempt(self, number: int, running: list[int]) -> None:
        """Take a running sequence out of the batch; it comes back when it is its turn."""
        self._runner.preempt(number)
        self._preempted.add(number)
        self._returned.discard(number)
        self.preemptions += 1
        running.remove(number)

    def note_token(self, number: int) -> None:
        """Note that a sequence has generated a token: it may be preempted again."""
        self._returned.discard(number)

    def _victim(self, running: list[int], fixed: Set[int]) -> int | None:
        others = [number for number in running if number not in fixed]
        if len(others) == len(running):
            others = running[1:]
        return next(
            (number for number in reversed(others) if number not in self._returned),
            others[-1] if others else None,
        )

    def _next(self, running: list[int], waiting: list[int]) -> int | None:
        """The first that awaits nothing, of those at the head of the line."""
        head = waiting[:HEAD]
        return next((each for each in head if not self._runner.awaits(each, running)), None)

    def _begin(self, number: int, running: list[int], waiting: list[int], fixed: Set[int]) -> bool:
        """Let a waiting sequence run, if there is or can be made room for it."""
        if running and not self._make_room(number, running, waiting, fixed):
            return False
        if not self._runner.begin(number):
            return False
        if number in self._preempted:
            self._preempted.remove(number)
            self._returned.add(number)
        return True

    def _make_room(
        self, number: int, running: list[int], waiting: list[int], fixed: Set[int]
    ) -> bool:
        """Whether there is room for a waiting sequence, if need be in the place of sequences of
        worse priorities: of none if that would not be enough."""
        if self._runner.has_room(number, running):
            return True
        (priority, _), spared = self._order(number), fixed | self._returned
        victims = [
            each for each in running if self._order(each)[0] > priority and each not in spared
        ]
        if not victims or not self._runner.would_have_room(number, running, victims):
            return False
        while victims:
            waiting.append(victims[-1])
            self._preempt(victims.pop(), running)
            if self._runner.has_room(number, running):
                return True
        return False

    def _forget_ended(self, running: list[int], waiting: list[int]) -> None:
        if self._preempted or self._returned:
            self._preempted &= set(waiting)
            self._returned &= set(running)
