"""Connects the ranks that mlx.launch has started, and asks all of them questions, through rank 0.

Rank 0 listens, and tells the others where, and a key, in an array that MLX's collectives carry.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx

from paged_kv.allocator.errors import PagedKVError
from paged_kv.integrations.distributed.connections import (
    BROKEN,
    MOST_NEWCOMERS,
    Accepted,
    Meeting,
    accept,
    connect,
)
from paged_kv.integrations.distributed.watch import Watch
from paged_kv.ranks import ALONE, RankMemory, Ranks

Answer = TypeVar("Answer")

# A prompt of many thousand tokens is computed in steps, none of which takes so long.
DEFAULT_TIMEOUT_S = 300.0

# All ranks are past MLX's own meeting when this one begins.
MEETING_S = 60.0


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
                told = self._exchanged((question, answer))
        finally:
            self._turn.release()
        if any(asked != question for asked, _ in told):
            each = ", ".join(
                f"rank {rank} asks for {asked!r}" for rank, (asked, _) in enumerate(told)
            )
            raise RanksDiffer(f"the ranks have come apart at question {self._exchange}: {each}")
        return [its_answer for _, its_answer in told]

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self.watch.noted(self._exchange, "computing"):
            yield

    def abandon(self) -> None:
        self.watch.has_failed = True

    def _exchanged(self, own: tuple[str, Answer]) -> list[tuple[str, Answer]]:
        """The questions and answers of all ranks, through rank 0."""
        if self.rank != 0:
            self._send(0, own)
            all_told: list[tuple[str, Answer]] = self._receive(0)
            return all_told
        all_told = [own, *map(self._receive, range(1, self.size))]
        for rank in range(1, self.size):
            self._send(rank, all_told)
        return all_told

    def _send(self, rank: int, message: object) -> None:
        try:
            self._connections[rank].send(message)
        except BROKEN:
            self.watch.await_abort(rank)

    def _receive(self, rank: int) -> Any:
        try:
            return self._connections[rank].recv()
        except BROKEN:
            self.watch.await_abort(rank)


@cache
def joined_ranks() -> Ranks:
    """The processes that mlx.launch has started, or `ALONE`. All of them call this, which connects
    them at the first time.

    Raises:
        NotConnected: they cannot reach each other.
        ValueError: PAGED_KV_RANK_TIMEOUT is not a positive number of seconds.
    """
    group = mx.distributed.init()
    if group.size() == 1:
        return ALONE
    timeout_s = _timeout_s()
    rank, size = group.rank(), group.size()
    # Questions wait for answers, and the watch must not wait for them.
    questions, heartbeats = _connected(rank, size), _connected(rank, size)
    return ConnectedRanks(rank, size, questions, Watch(rank, heartbeats, timeout_s))


def _connected(rank: int, size: int) -> Accepted:
    """On rank 0 a connection to each other rank, elsewhere one to rank 0."""
    if rank != 0:
        return {0: connect(_shared(None), rank)}
    with socket.create_server(("", 0), backlog=MOST_NEWCOMERS) as listening:
        port = listening.getsockname()[1]
        meeting = _shared(Meeting(_hosts(), port, secrets.token_bytes(32)))
        return accept(listening, meeting.key, range(1, size), MEETING_S)


def _shared(meeting: Meeting | None) -> Meeting:
    """Rank 0's meeting, on every rank."""
    data = b""
    if meeting is not None:
        data = json.dumps([meeting.hosts, meeting.port, meeting.key.hex()]).encode()
    length = cast("int", mx.distributed.all_sum(mx.array(len(data))).item())
    mine = mx.array(list(data) or [0] * length, dtype=mx.uint8)
    told = bytes(mx.distributed.all_sum(mine).tolist())  # type: ignore[arg-type]
    hosts, port, key = json.loads(told)
    return Meeting(hosts, port, bytes.fromhex(key))


def _hosts() -> list[str]:
    """The addresses of this machine, the likeliest first: the one that MLX was given, its name."""
    named = os.environ.get("PAGED_KV_RANK_HOST")
    if named:
        return [named]
    return list(dict.fromkeys([*_hosts_of_mlx(), socket.gethostname(), "127.0.0.1"]))


def _hosts_of_mlx() -> list[str]:
    """Rank 0's addresses in what mlx.launch gives the backends ring, JACCL and NCCL."""
    found = []
    if hostfile := os.environ.get("MLX_HOSTFILE"):
        found += [str(each) for each in json.loads(Path(hostfile).read_text("utf-8"))[0]]
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        found.append(coordinator)
    hosts = [each.rpartition(":")[0] or each for each in found]
    return [*hosts, *filter(None, [os.environ.get("NCCL_HOST_IP")])]


def _timeout_s() -> float:
    text = os.environ.get("PAGED_KV_RANK_TIMEOUT", str(DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(
            f"PAGED_KV_RANK_TIMEOUT must be a positive number of seconds, got {text!r}"
        )
    return seconds
