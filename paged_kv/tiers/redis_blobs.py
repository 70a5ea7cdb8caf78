"""Entries on a server that speaks the protocol of Redis, such as Redis or Valkey.

Needs the extra "redis".
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError
from redis.retry import Retry

from paged_kv.store.entry_file import Buffer
from paged_kv.tiers.address import RedisAddress
from paged_kv.tiers.blobs import RemoteFault

PREFIX = "paged-kv:"
# Of reads of 4 MB on loopback, 64 kB gave 2.4 GB/s, 1 MiB 4.4 GB/s and 4 MiB 3.0 GB/s.
_READ_BYTES = 1 << 20
# An entry of 16 MB that is read as one piece comes half as fast as one of 4 MB.
_PIECE_BYTES = 4 << 20
_REMOVED_AT_ONCE = 1000


class RedisBlobs:
    """See `Blobs`.

    Args:
        address: of the server.
        patience_s: seconds that connecting, and each wait for bytes, may take.
    """

    def __init__(self, address: RedisAddress, patience_s: float) -> None:
        files = {
            "ssl_ca_certs": address.ca,
            "ssl_certfile": address.cert,
            "ssl_keyfile": address.key,
        }
        tls: dict[str, Any] = {}
        if address.tls:
            tls["connection_class"] = redis.SSLConnection
            tls |= {name: str(file) for name, file in files.items() if file is not None}
        self._pool = redis.ConnectionPool(
            host=address.host,
            port=address.port,
            db=address.db,
            username=address.user,
            password=address.password,
            socket_timeout=patience_s,
            socket_connect_timeout=patience_s,
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

    def get(self, name: str, nbytes: int) -> Buffer:
        data, end = memoryview(bytearray(nbytes)), 0
        with _faults():
            for start in range(0, nbytes, _PIECE_BYTES):
                last = min(start + _PIECE_BYTES, nbytes) - 1
                piece: Any = self._client.getrange(PREFIX + name, start, last)
                end = start + len(piece)
                data[start:end] = piece
                if end <= last:
                    break
        return data[:end]

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        with _faults():
            self._client.set(PREFIX + name, b"".join(data))

    def names(self) -> Iterator[tuple[str, int]]:
        with _faults():
            found = [each.decode() for each in self._client.scan_iter(PREFIX + "*", count=1000)]
        names = [each.removeprefix(PREFIX) for each in found]
        yield from zip(names, self.sizes(names), strict=True)

    def remove(self, names: Sequence[str]) -> None:
        with _faults():
            for start in range(0, len(names), _REMOVED_AT_ONCE):
                some = [PREFIX + name for name in names[start : start + _REMOVED_AT_ONCE]]
                self._client.unlink(*some)

    def interrupt(self) -> None:
        self._pool.disconnect()

    def close(self) -> None:
        self._client.close()
        self._pool.disconnect()


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
