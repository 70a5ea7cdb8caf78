"""Ends this process when another rank has died or hangs.

A rank that waits in a step of the model cannot be interrupted, and MLX's collectives have no
time-out: only the end of the process ends the waiting. So a thread of each rank tells rank 0 twice
a second what its rank is doing, and rank 0 answers. Rank 0 judges, and its message names the rank
that is missing.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import NoReturn

from paged_kv.integrations.distributed.connections import BROKEN
from paged_kv.pool.page_pool import open_pools
from paged_kv.ranks import RankMemory

HEARTBEAT_S = 0.5

NO_MEMORY = RankMemory()

# How long a rank that leaves waits for the others' answers, which come with their next heartbeats.
LEAVE_S = 10.0

# The exit status of ranks that end because another one has.
LOST_STATUS = 75


@dataclass(frozen=True)
class Heartbeat:
    """What a rank is doing.

    Attributes:
        exchange: the number of its latest question.
        doing: "waiting" for the others' answers, "computing" a step, or "" for other work.
        seconds: since when.
        memory: of its pools.
    """

    exchange: int
    doing: str
    seconds: float
    memory: RankMemory = NO_MEMORY


@dataclass(frozen=True)
class Abort:
    """Rank 0's message that all ranks are to end."""

    message: str


@dataclass(frozen=True)
class Leave:
    """A rank's last message: it has nothing more to do. The others answer with theirs."""


class Watch:
    """Watches the other ranks, from its construction on.

    Args:
        rank: of this process.
        connections: on rank 0 one to each other rank, elsewhere one to rank 0.
        patience_s: seconds that a rank may keep the others waiting, or take for a step.

    Attributes:
        has_failed: whether to end without a `Leave`, so that the others end too.
    """

    def __init__(self, rank: int, connections: dict[int, Connection], patience_s: float) -> None:
        self._rank = rank
        self._open = connections  # a rank that has left may still read its last message
        self._connections = dict(connections)
        self._patience_s = patience_s
        self._doing = (0, "", monotonic())
        self._heartbeats: dict[int, Heartbeat] = {}
        self._memory = NO_MEMORY
        self._heard = dict.fromkeys(connections, monotonic())
        self._lock = threading.Lock()
        self._is_ending = False
        self.has_failed = False
        self._thread = threading.Thread(target=self._run, name="paged-kv-watch", daemon=True)
        self._thread.start()
        atexit.register(self._leave_at_exit)

    @contextmanager
    def noted(self, exchange: int, doing: str) -> Iterator[None]:
        """Note what this rank does, for the time that it does it."""
        before = self._doing[1]
        self._doing = exchange, doing, monotonic()
        try:
            yield
        finally:
            self._doing = exchange, before, monotonic()

    @property
    def doing(self) -> str:
        """What this rank is doing; see `Heartbeat`."""
        return self._doing[1]

    @property
    def memory(self) -> dict[int, RankMemory]:
        """What each rank has told of its memory, on rank 0; elsewhere rank 0's and this one's."""
        told = {rank: heartbeat.memory for rank, heartbeat in self._heartbeats.copy().items()}
        return dict(sorted((told | {self._rank: self._memory}).items()))

    def leave(self) -> None:
        """Tell the others that this rank has nothing more to do, and watch them no longer. It waits
        for their answers: TCP may drop the last message of a connection that is closed at once."""
        self._is_ending = True
        self._notify(Leave())
        self._thread.join(LEAVE_S)

    def await_abort(self, rank: int) -> NoReturn:
        """Wait for the end of this process, as a connection to another rank is broken."""
        self._thread.join(self._patience_s)
        self._end(f"rank {rank} has ended")

    def _run(self) -> None:
        next_heartbeat = monotonic()
        while self._connections:
            ranks = {connection: rank for rank, connection in self._connections.items()}
            for connection in wait([*ranks], max(0.0, next_heartbeat - monotonic())):
                assert isinstance(connection, Connection)
                self._hear(ranks[connection], connection)
            # A heartbeat that answered each of the others' would be answered by them at once.
            if monotonic() >= next_heartbeat:
                next_heartbeat = monotonic() + HEARTBEAT_S
                self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        self._memory = own_memory(self._memory)
        if not self._is_ending:
            self._notify(self._own_heartbeat())
            if self._rank == 0:
                self._judge()

    def _hear(self, rank: int, connection: Connection) -> None:
        try:
            message = connection.recv()
        except BROKEN:
            if self._is_ending:
                self._forget(rank)
                return
            self._end(f"rank {rank} has ended, and the others cannot go on without it")
        match message:
            case Abort():
                self._end(message.message)
            case Leave():
                if not self._is_ending:
                    self._notify(Leave(), [connection])
                self._forget(rank)
            case Heartbeat():
                self._heartbeats[rank], self._heard[rank] = message, monotonic()

    def _forget(self, rank: int) -> None:
        for each in (self._connections, self._heard, self._heartbeats):
            each.pop(rank, None)

    def _own_heartbeat(self) -> Heartbeat:
        exchange, doing, since = self._doing
        return Heartbeat(exchange, doing, monotonic() - since, self._memory)

    def _judge(self) -> None:
        """End all ranks if one is silent, or has let the others wait for too long."""
        silent = [rank for rank, at in self._heard.items() if monotonic() - at > self._patience_s]
        if silent:
            self._end(f"{_named(silent)} has been silent for {self._patience_s:g} s")
        heartbeats = self._heartbeats | {0: self._own_heartbeat()}
        late = [
            each for each in heartbeats.values() if each.doing and each.seconds > self._patience_s
        ]
        if late and len(heartbeats) == len(self._connections) + 1:
            self._end(hanging(heartbeats, self._patience_s))

    def _notify(self, message: object, to: Collection[Connection] | None = None) -> None:
        for connection in list(self._connections.values()) if to is None else to:
            try:
                with self._lock:
                    connection.send(message)
            except BROKEN:
                continue  # `_hear` finds out, after the messages that have arrived before

    def _end(self, message: str) -> NoReturn:
        self._notify(Abort(message))
        print(f"paged-kv: rank {self._rank} ends: {message}", file=sys.stderr, flush=True)
        os._exit(LOST_STATUS)

    def _leave_at_exit(self) -> None:
        # Without a `Leave`, the others learn that this rank has failed.
        if not self.has_failed and getattr(sys, "last_value", None) is None:
            self.leave()


def hanging(heartbeats: dict[int, Heartbeat], patience_s: float) -> str:
    """Names the ranks for which the others wait."""
    newest = max(each.exchange for each in heartbeats.values())
    late = [
        rank
        for rank, heartbeat in sorted(heartbeats.items())
        if (heartbeat.exchange, heartbeat.doing) != (newest, "waiting")
    ]
    if len(late) < len(heartbeats):
        return f"{_named(late)} has kept the others waiting for {patience_s:g} s"
    return (
        f"a step has taken more than {patience_s:g} s on all ranks: either one of them hangs, or "
        "PAGED_KV_RANK_TIMEOUT is too short for this model"
    )


def _named(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


# The thread that asks must not wait for a pool that a hanging rank has locked.
_LOCK_PATIENCE_S = 0.05


def own_memory(before: RankMemory) -> RankMemory:
    """The memory of this process's pools; `before` if one of them is locked."""
    stats = []
    for pool in open_pools.items():
        if not pool.lock.acquire(timeout=_LOCK_PATIENCE_S):
            return before
        try:
            stats.append(pool.snapshot())
        finally:
            pool.lock.release()
    return RankMemory(
        sum(each.bytes_budget for each in stats),
        sum(each.bytes_mapped for each in stats),
        sum(each.bytes_active for each in stats),
    )
