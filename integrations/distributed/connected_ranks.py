"""Asks all ranks a question, through rank 0."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from paged_kv.allocator.errors import PagedKVError
from paged_kv.integrations.distributed.connections import BROKEN
from paged_kv.integrations.distributed.watch import Watch
from paged_kv.ranks import RankMemory, Ranks

Answer = TypeVar("Answer")


class RanksDiffer(PagedKVError):
    """Ranks of one model have come to different states, so they cannot compute it together."""


class ConnectedRanks(Ranks):
    """The ranks of a model on several processes.

    Args:
        rank, size: see `Ranks`.
        connections: on rank 0 one to each other rank, elsewhere one to rank 0.
        watch: ends this process when another rank has died or hangs.
    """

    def __init__(
        self, rank: int, size: int, connections: dict[int, Connection], watch: Watch
    ) -> None:
        self.rank, self.size = rank, size
        self.watch = watch
        self._connections = connections
        self._exchange = 0
        self._turn = threading.Lock()

    @property
    def memory(self) -> Mapping[int, RankMemory]:
        """See `Ranks`. Rank 0 knows all ranks', another one rank 0's and its own."""
        return self.watch.memory

    def gather(self, question: str, answer: Answer) -> list[Answer]:
        """See `Ranks`.

        Raises:
            RanksDiffer: the ranks ask different questions.
            RuntimeError: another thread asks at the same time.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                f"two threads use a model that {self.size} ranks share: use it from one thread"
            )
        try:
            self._exchange += 1
            with self.watch.noted(self._exchange, "waiting"):
                return (
                    self._collect(question, answer)
                    if self.rank == 0
                    else self._ask(question, answer)
                )
        finally:
            self._turn.release()

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self.watch.noted(self._exchange, "computing"):
            yield

    def abandon(self) -> None:
        self.watch.has_failed = True

    def _collect(self, question: str, answer: Answer) -> list[Answer]:
        asked, answers = [question], [answer]
        for rank in range(1, self.size):
            its_question, its_answer = self._receive(rank)
            asked.append(its_question)
            answers.append(its_answer)
        error = None
        if set(asked) != {question}:
            each = ", ".join(f"rank {rank} asks for {it!r}" for rank, it in enumerate(asked))
            error = f"the ranks have come apart at question {self._exchange}: {each}"
        for rank in range(1, self.size):
            self._send(rank, (error, answers))
        return _known(error, answers)

    def _ask(self, question: str, answer: Answer) -> list[Answer]:
        self._send(0, (question, answer))
        return _known(*self._receive(0))

    def _send(self, rank: int, message: object) -> None:
        try:
            self._connections[rank].send(message)
        except BROKEN:
            self.watch.await_verdict(rank)

    def _receive(self, rank: int) -> tuple[Any, Any]:
        try:
            message: tuple[Any, Any] = self._connections[rank].recv()
            return message
        except BROKEN:
            self.watch.await_verdict(rank)


def _known(error: str | None, answers: list[Answer]) -> list[Answer]:
    if error is not None:
        raise RanksDiffer(error)
    return answers
