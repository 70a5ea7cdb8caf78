"""Decides before each step which sequences run, in their order: that of their priorities, if they
have any, and of their arrival.

A sequence is named by its number, which counts arrivals. The line of waiting sequences is sorted by
that order, so a preempted sequence, which came before those that have never run, is at the head of
those of its priority.

    begins      the head of the line, while there is room for it and a place
    preempted   the last of the running sequences, while the next step of all does not fit

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

    def has_room(self, number: int, running: list[int]) -> bool:
        """Whether a waiting sequence may begin beside the running ones."""
        ...

    def begin(self, number: int) -> bool:
        """Let a waiting sequence run, and reserve memory for its first step; false, and no effect,
        if the pool does not hold it."""
        ...


class Scheduler:
    """Chooses the sequences of each step.

    Args:
        runner: runs them.
        order: what sequences are sorted by; their numbers if it is not given.

    Attributes:
        preemptions: how often a sequence was preempted.
    """

    def __init__(self, runner: Runner, order: Callable[[int], Any] = int) -> None:
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
        """Choose the sequences of the next step: moves numbers between these two sorted lists.
        `places` is the number of sequences that may begin, and `fixed` those that cannot be
        preempted. False if memory does not hold the next step of the first and of these.

        O(running sequences) if nothing is preempted and nothing waits.
        """
        self._forget_ended(running, waiting)
        while not self._runner.reserve(running):
            victim = self._victim(running, fixed)
            if victim is None:
                return False
            self.preempt(victim)
            running.remove(victim)
            insort(waiting, victim, key=self._order)
        while waiting and places > 0 and self._begin(waiting[0], running):
            running.append(waiting.pop(0))
            running.sort(key=self._order)
            places -= 1
        return bool(running) or not waiting or places <= 0

    def is_spared(self, number: int) -> bool:
        """Whether a sequence has come back and has not generated a token since."""
        return number in self._returned

    def preempt(self, number: int) -> None:
        """Take a running sequence out of the batch; it comes back when it is its turn."""
        self._runner.preempt(number)
        self._preempted.add(number)
        self._returned.discard(number)
        self.preemptions += 1

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

    def _begin(self, number: int, running: list[int]) -> bool:
        if running and not self._runner.has_room(number, running):
            return False
        if not self._runner.begin(number):
            return False
        if number in self._preempted:
            self._preempted.remove(number)
            self._returned.add(number)
        return True

    def _forget_ended(self, running: list[int], waiting: list[int]) -> None:
        if self._preempted or self._returned:
            self._preempted &= set(waiting)
            self._returned &= set(running)
