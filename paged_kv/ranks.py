"""How the processes ("ranks") that compute one model together decide the same.

Each rank runs the same code on the same events, and all of them compute each step together. If one
decided differently, the others would wait in a step for ever. So whatever may differ between
machines is asked of all ranks before it is used: memory, prefixes, stored pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

Answer = TypeVar("Answer")


class RankMemory(NamedTuple):
    """Bytes of all pools of a rank.

    Attributes:
        budget: the most that may be mapped.
        mapped: of all slabs.
        active: of the pages that sequences hold.
    """

    budget: int = 0
    mapped: int = 0
    active: int = 0


class Ranks:
    """The ranks of a model. This class is a process that computes a model alone.

    Every rank asks the same questions in the same order, from one thread at a time.

    Attributes:
        rank: the number of this process; rank 0 decides what only one can know.
        size: the number of processes.
    """

    rank = 0
    size = 1

    @property
    def memory(self) -> Mapping[int, RankMemory]:
        """What is known of each rank's memory; empty for a process alone."""
        return {}

    def gather(self, question: str, answer: Answer) -> list[Answer]:
        """The answers of all ranks, in the order of their numbers, equal on each. An answer is made
        of plain Python values."""
        return [answer]

    def all_true(self, question: str, answer: bool) -> bool:
        """Whether every rank says yes."""
        return all(self.gather(question, answer))

    def all_min(self, question: str, answer: int) -> int:
        """The smallest number of all ranks'."""
        return min(self.gather(question, answer))

    def broadcast(self, question: str, answer: Answer) -> Answer:
        """Rank 0's answer; those of the others are ignored."""
        return self.gather(question, answer)[0]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Surrounds a step of the model, which all ranks compute together."""
        yield

    def abandon(self) -> None:
        """Note that this process fails, so that its end ends the other ranks too."""


ALONE = Ranks()
