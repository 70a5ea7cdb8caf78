"""Entries on a server that speaks the protocol of Redis, such as Redis or Valkey.

Needs the extra "redis".
"""

from __future__ import annotations

import ssl
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError
from redis.retry import Retry

from paged_kv.store.blob_store import Blob, BlobStore, Outcome, RemoteFault, round_trips
from paged_kv.store.entry_file import Buffer, Sealing
from paged_kv.store.options import RedisAddress

PREFIX = "paged-kv:"
# Of reads of 4 MB on loopback, 64 kB gave 2.4 GB/s, 1 MiB 4.4 GB/s and 4 MiB 3.0 GB/s.
_READ_BYTES = 1 << 20
# An entry of 16 MB that is read as one piece comes half as fast as one of 4 MB.
_PIECE_BYTES = 4 << 20
# A server keeps in memory what it answers in one round trip.
_PIECES_AT_ONCE = 4
_REMOVED_AT_ONCE = 1000


class RedisBlobs(BlobStore):
    """See `BlobStore`. Connecting, and each wait for bytes, may take `patience_s`."""

    label = "redis"

    def __init__(self, address: RedisAddress, seal: Sealing) -> None:
        self.name, self.seal = str(address), seal
        tls: dict[str, Any] = {}
        if address.tls:
            files = {"ca_certs": address.ca, "certfile": address.cert, "keyfile": address.key}
            tls = {f"ssl_{name}": str(file) for name, file in files.items() if file is not None}
            tls["connection_class"] = redis.SSLConnection
        self._pool = _Connections(
            host=address.host,
            port=address.port,
            db=address.db,
            username=address.user,
            password=address.password,
            socket_timeout=self.patience_s,
            socket_connect_timeout=self.patience_s,
            socket_read_size=_READ_BYTES,
            protocol=2,
            # A pause follows a failure, and the caller computes meanwhile.
            retry=Retry(NoBackoff(), 0),
            **tls,
        )
        self._client = redis.Redis(connection_pool=self._pool)

    def sizes(self, names: Sequence[str]) -> list[int]:
        with _faults(), self._client.pipeline(transaction=False) as asked:
            for name in names:
                asked.strlen(PREFIX + name)
            return [int(size) for size in asked.execute()]

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[Buffer]:
        found: list[Buffer] = [b""] * len(wanted)
        ends = [0] * len(wanted)
        pieces = [  # of which entry, from where, and to where
            (at, start, min(start + _PIECE_BYTES, nbytes))
            for at, (_, nbytes) in enumerate(wanted)
            for start in range(0, nbytes, _PIECE_BYTES)
        ]
        with _faults():
            most = _PIECES_AT_ONCE * _PIECE_BYTES
            for at_once in round_trips(pieces, lambda piece: piece[2] - piece[1], most):
                with self._client.pipeline(transaction=False) as asked:
                    for at, start, end in at_once:
                        asked.getrange(PREFIX + wanted[at][0], start, end - 1)
                    answers = asked.execute()
                for (at, start, _), data in zip(at_once, answers, strict=True):
                    if start != ends[at]:  # it has become shorter
                        continue
                    ends[at], nbytes = start + len(data), wanted[at][1]
                    if len(data) == nbytes:
                        found[at] = data
                    else:
                        whole = memoryview(found[at] if start else bytearray(nbytes))
                        whole[start : ends[at]] = data
                        found[at] = whole
        return [memoryview(data)[:end] for data, end in zip(found, ends, strict=True)]

    def put(
        self, entries: Sequence[tuple[str, Sequence[Buffer]]], keep: Collection[str] = ()
    ) -> list[Outcome]:
        for name, data in entries:
            with _faults():
                self._client.set(PREFIX + name, b"".join(data))
            self.written = self.written.plus(sum(map(len, data)))
        return [Outcome.STORED] * len(entries)

    def entries(self) -> Iterator[Blob]:
        with _faults():
            found = [each.decode() for each in self._client.scan_iter(PREFIX + "*", count=1000)]
        names = [each.removeprefix(PREFIX) for each in found]
        yield from map(Blob, names, self.sizes(names))

    def remove(self, names: Sequence[str]) -> None:
        with _faults():
            for start in range(0, len(names), _REMOVED_AT_ONCE):
                some = [PREFIX + name for name in names[start : start + _REMOVED_AT_ONCE]]
                self._client.unlink(*some)

    def interrupt(self) -> None:
        self._pool.interrupt()

    def close(self) -> None:
        self._client.close()
        self._pool.disconnect()


class _Connections(redis.ConnectionPool):
    """Connections to one server, which lets calls fail and keeps the connections that are being
    made: for a server that is far away, that takes longer than a prompt waits."""

    def __init__(self, **options: Any) -> None:
        self._made: set[Any] = set()
        super().__init__(**options)

    def get_connection(self, *arguments: Any, **options: Any) -> Any:
        connection = super().get_connection(*arguments, **options)
        self._made.add(connection)
        return connection

    def release(self, connection: Any) -> None:
        self._made.discard(connection)
        super().release(connection)

    def interrupt(self) -> None:
        """Let calls that wait for an answer fail."""
        for connection in self._made.copy():
            connection.disconnect()


@contextmanager
def _faults() -> Iterator[None]:
    """Turn the client's errors into RemoteFault. A connection that another thread closes raises
    errors of other types."""
    try:
        yield
    except OutOfMemoryError as error:
        raise RemoteFault(error, is_full=True) from None
    except (RedisError, OSError, ValueError, AttributeError) as error:
        # The client calls every fault of a connection the same.
        cause = error.__context__
        raise RemoteFault(cause if isinstance(cause, ssl.SSLError) else error) from None
