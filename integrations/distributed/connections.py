"""Authenticated connections between rank 0 and the other ranks, for messages of Python objects.

Messages are pickled, so both ends prove first that they know a key, which only the ranks share:
each sends a random challenge and gets its HMAC. Rank 0 never waits for one client alone, so clients
that say nothing, or half of it, keep no rank out.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Result = TypeVar("Result")

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


Accepted = dict[int, Connection]


def connect(meeting: Meeting, rank: int) -> Connection:
    """A connection to rank 0.

    Raises:
        NotConnected: no address of rank 0 answers.
    """
    failures = []
    for host in meeting.hosts:
        try:
            with socket.create_connection((host, meeting.port), CONNECT_S) as connected:
                connected.setblocking(False)
                _run(_prove(connected, meeting.key, rank))
                return _connection(connected)
        except OSError as error:
            failures.append(f"{host}: {str(error) or 'no answer'}")
    raise NotConnected(
        f"rank {rank} cannot reach rank 0 at port {meeting.port} ({'; '.join(failures)}): let the "
        "machines connect to each other, or set PAGED_KV_RANK_HOST to an address of rank 0's"
    )


def accept(listening: socket.socket, key: bytes, ranks: Iterable[int], seconds: float) -> Accepted:
    """A connection from each of these ranks.

    Raises:
        NotConnected: some have not come within `seconds`; the message names them.
    """
    return _run(_Door(listening, key, ranks).wait(seconds))


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    # In a thread of its own: whoever calls this may run an event loop already.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


class _Door:
    """Where rank 0 hears all clients at once."""

    def __init__(self, listening: socket.socket, key: bytes, ranks: Iterable[int]) -> None:
        self._listening, self._key, self._missing = listening, key, set(ranks)
        self._found: Accepted = {}
        self._newcomers: list[asyncio.Task[None]] = []  # the earliest first
        self._all_there = asyncio.Event()

    async def wait(self, seconds: float) -> Accepted:
        """See `accept`. The loop's end drops those that have proved nothing."""
        opened = asyncio.create_task(self._open())
        try:
            async with asyncio.timeout(seconds):
                await self._all_there.wait()
        except TimeoutError:
            names = ", ".join(map(str, sorted(self._missing)))
            raise NotConnected(
                f"rank {names} did not connect to rank 0 within {seconds:g} s: look at the output "
                "of that rank"
            ) from None
        finally:
            opened.cancel()
        return self._found

    async def _open(self) -> None:
        self._listening.setblocking(False)
        while True:
            try:
                connected, _ = await asyncio.get_running_loop().sock_accept(self._listening)
            except OSError:  # it has left already, or too many files are open
                await asyncio.sleep(0.01)
                continue
            self._newcomers = [each for each in self._newcomers if not each.done()]
            if len(self._newcomers) == MOST_NEWCOMERS:
                self._newcomers.pop(0).cancel()
            self._newcomers.append(asyncio.create_task(self._greet(connected)))

    async def _greet(self, connected: socket.socket) -> None:
        with connected, suppress(OSError):  # which closes it, unless it became a connection
            rank = await _proven(connected, self._key)
            self._found[rank] = _connection(connected)
            self._missing.discard(rank)
            if not self._missing:
                self._all_there.set()


async def _proven(connected: socket.socket, key: bytes) -> int:
    """The rank that a client proves to be.

    Raises:
        OSError: it does not.
    """
    async with asyncio.timeout(PROOF_S):
        loop = asyncio.get_running_loop()
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        await loop.sock_sendall(connected, own)
        number, theirs, digest = _parts(await _received(connected, _PROOF_BYTES))
        if not hmac.compare_digest(digest, _digest(key, b"rank" + number, own, theirs)):
            raise ConnectionError("it does not know the ranks' key")
        await loop.sock_sendall(connected, _digest(key, b"rank 0", theirs, own))
    return int.from_bytes(number, "big")


async def _prove(connected: socket.socket, key: bytes, rank: int) -> None:
    """Prove to rank 0 that this is a rank, and find out that it is rank 0.

    Raises:
        OSError: it does not answer in time, or does not know the key.
    """
    async with asyncio.timeout(PROOF_S):
        theirs = await _received(connected, _CHALLENGE_BYTES)
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        number = rank.to_bytes(_RANK_BYTES, "big")
        proof = number + own + _digest(key, b"rank" + number, theirs, own)
        await asyncio.get_running_loop().sock_sendall(connected, proof)
        answer = await _received(connected, _DIGEST_BYTES)
    if not hmac.compare_digest(answer, _digest(key, b"rank 0", own, theirs)):
        raise ConnectionError("what answers there does not know the ranks' key")


async def _received(connected: socket.socket, nbytes: int) -> bytes:
    """So many bytes and no more: what follows is for whoever gets the connection."""
    data = b""
    while len(data) < nbytes:
        more = await asyncio.get_running_loop().sock_recv(connected, nbytes - len(data))
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
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())
