"""Authenticated connections between rank 0 and the other ranks, for messages of Python objects.

Messages are pickled, so both ends prove first that they know a key, which only the ranks share:
each sends a random challenge and gets its HMAC. Rank 0 never waits for one client alone, so clients
that say nothing, or half of it, keep no rank out.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic
from typing import cast

# One attempt to reach an address of rank 0, of which there may be several.
CONNECT_S = 5.0

# A rank proves itself within two round trips. Whoever has not after this time is no rank.
PROOF_S = 5.0

# Clients that may be about to prove themselves. With more of them, the earliest goes.
MOST_NEWCOMERS = 64

_CHALLENGE_BYTES = _DIGEST_BYTES = 32
_RANK_BYTES = 4
# What a rank answers: its number, its own challenge, and the digest of rank 0's.
_PROOF_BYTES = _RANK_BYTES + _CHALLENGE_BYTES + _DIGEST_BYTES

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
            connected = socket.create_connection((host, meeting.port), CONNECT_S)
        except OSError as error:
            failures.append(f"{host}: {error}")
            continue
        try:
            _prove(connected, meeting.key, rank)
            return _connection(connected)
        except BROKEN as error:
            connected.close()
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
    newcomers = _Newcomers(listening, key)
    try:
        while missing:
            left = until - monotonic()
            if left <= 0:
                names = ", ".join(map(str, sorted(missing)))
                raise NotConnected(
                    f"rank {names} did not connect to rank 0 within {seconds:g} s: look at the "
                    "output of that rank"
                )
            for rank, connected in newcomers.proven(min(left, PROOF_S)):
                found[rank] = _connection(connected)
                missing.discard(rank)
    finally:
        newcomers.close()
    return found


Accepted = dict[int, Connection]


@dataclass
class _Newcomer:
    """A client that has not proved yet to be a rank.

    Attributes:
        challenge: what it was sent.
        until: when it goes.
        said: what it has answered so far.
    """

    challenge: bytes
    until: float
    said: bytes = b""


class _Newcomers:
    """The clients that rank 0 hears, all at once."""

    def __init__(self, listening: socket.socket, key: bytes) -> None:
        self._listening, self._key = listening, key
        self._waiting: dict[socket.socket, _Newcomer] = {}  # the earliest first
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)

    def proven(self, seconds: float) -> Iterator[tuple[int, socket.socket]]:
        """Wait at most so long for clients to say something; those that have proved a rank."""
        for ready, _ in self._selector.select(seconds):
            connected = cast("socket.socket", ready.fileobj)
            if connected is self._listening:
                self._greet()
            elif connected in self._waiting:  # not one that has just made way for another
                rank = self._hear(connected, self._waiting[connected])
                if rank is not None:
                    yield rank, connected
        for connected, newcomer in list(self._waiting.items()):
            if newcomer.until <= monotonic():
                self._drop(connected)

    def close(self) -> None:
        """Drop those that have proved nothing."""
        for connected in list(self._waiting):
            self._drop(connected)
        self._selector.close()

    def _greet(self) -> None:
        try:
            connected = self._listening.accept()[0]
        except OSError:
            return  # it has left already
        connected.setblocking(False)
        if len(self._waiting) == MOST_NEWCOMERS:
            self._drop(next(iter(self._waiting)))
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        self._waiting[connected] = _Newcomer(challenge, monotonic() + PROOF_S)
        self._selector.register(connected, selectors.EVENT_READ)
        try:
            connected.sendall(challenge)
        except OSError:
            self._drop(connected)

    def _hear(self, connected: socket.socket, newcomer: _Newcomer) -> int | None:
        """The rank that a client has proved to be; None if it has not yet, or has failed to."""
        try:
            more = connected.recv(_PROOF_BYTES - len(newcomer.said))
            newcomer.said += more
            if more and len(newcomer.said) < _PROOF_BYTES:
                return None
            rank, challenge, digest = _parts(newcomer.said)
            right = _digest(self._key, b"rank" + rank, newcomer.challenge, challenge)
            if more and hmac.compare_digest(digest, right):
                connected.sendall(_digest(self._key, b"rank 0", challenge, newcomer.challenge))
                self._forget(connected)
                return int.from_bytes(rank, "big")
        except OSError:
            pass
        self._drop(connected)
        return None

    def _drop(self, connected: socket.socket) -> None:
        self._forget(connected)
        connected.close()

    def _forget(self, connected: socket.socket) -> None:
        self._selector.unregister(connected)
        del self._waiting[connected]


def _prove(connected: socket.socket, key: bytes, rank: int) -> None:
    """Prove to rank 0 that this is a rank, and find out that it is rank 0.

    Raises:
        OSError: it does not answer in time, or does not know the key.
    """
    until = monotonic() + PROOF_S
    theirs = _received(connected, _CHALLENGE_BYTES, until)
    own = secrets.token_bytes(_CHALLENGE_BYTES)
    number = rank.to_bytes(_RANK_BYTES, "big")
    connected.sendall(number + own + _digest(key, b"rank" + number, theirs, own))
    answer = _received(connected, _DIGEST_BYTES, until)
    if not hmac.compare_digest(answer, _digest(key, b"rank 0", own, theirs)):
        raise ConnectionError("what answers there does not know the ranks' key")


def _received(connected: socket.socket, nbytes: int, until: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        connected.settimeout(max(0.001, until - monotonic()))
        more = connected.recv(nbytes - len(data))
        if not more:
            raise ConnectionError("it has closed the connection")
        data += more
    return data


def _parts(proof: bytes) -> tuple[bytes, bytes, bytes]:
    challenge_end = _RANK_BYTES + _CHALLENGE_BYTES
    return proof[:_RANK_BYTES], proof[_RANK_BYTES:challenge_end], proof[challenge_end:]


def _digest(key: bytes, purpose: bytes, *challenges: bytes) -> bytes:
    """What proves to whoever has sent the first challenge that the key is known. The purpose keeps
    rank 0 from answering with what a rank has sent."""
    return hmac.digest(key, b"".join((purpose.ljust(8, b"\0"), *challenges)), "sha256")


def _connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())
