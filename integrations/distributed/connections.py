"""Authenticated connections between rank 0 and the other ranks, for messages of Python objects.

Messages are pickled, so both ends prove first that they know a key, which only the ranks share.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from time import monotonic

# One attempt to reach an address of rank 0, of which there may be several.
CONNECT_S = 5.0

BROKEN = (EOFError, OSError)
"""What a connection raises when the other process has ended."""


class NotConnected(OSError):
    """Two ranks could not reach each other."""


@dataclass(frozen=True)
class Meeting:
    """Where rank 0 waits for the others.

    Attributes:
        hosts: its addresses, the likeliest first.
        port: where it listens.
        key: proves that a process is one of the ranks.
    """

    hosts: list[str]
    port: int
    key: bytes


def connect(meeting: Meeting, rank: int) -> Connection:
    """A connection to rank 0.

    Raises:
        NotConnected: no address of rank 0 answers.
    """
    failures = []
    for host in meeting.hosts:
        try:
            connection = _connection(socket.create_connection((host, meeting.port), CONNECT_S))
            answer_challenge(connection, meeting.key)
            deliver_challenge(connection, meeting.key)
            connection.send(rank)
            return connection
        except (*BROKEN, AuthenticationError) as error:
            failures.append(f"{host}: {error}")
    raise NotConnected(
        f"rank {rank} cannot reach rank 0 at port {meeting.port} ({'; '.join(failures)}): let the "
        "machines connect to each other, or set PAGED_KV_RANK_HOST to an address of rank 0's"
    )


def accept(listening: socket.socket, key: bytes, ranks: Iterable[int], seconds: float) -> Accepted:
    """A connection from each of these ranks.

    Raises:
        NotConnected: some have not come within `seconds`; the message names them.
    """
    missing, found, until = set(ranks), {}, monotonic() + seconds
    while missing:
        listening.settimeout(max(0.01, until - monotonic()))
        try:
            connection = _connection(listening.accept()[0])
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            rank = connection.recv()
        except TimeoutError:
            names = ", ".join(map(str, sorted(missing)))
            raise NotConnected(
                f"rank {names} did not connect to rank 0 within {seconds:g} s: look at the output "
                "of that rank"
            ) from None
        except (*BROKEN, AuthenticationError):
            continue  # not one of the ranks
        found[rank] = connection
        missing.discard(rank)
    return found


Accepted = dict[int, Connection]


def _connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())
