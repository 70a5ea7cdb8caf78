"""Entries in a bucket of S3, or of a server that speaks its protocol.

Needs the extra "s3".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from paged_kv.store.blob_store import Blob, BlobStore, Outcome, RemoteFault
from paged_kv.store.entry_file import Buffer, Sealing
from paged_kv.store.options import S3Address

FOLDER = "paged-kv/"
# The protocol has no call for many names at once, so calls run side by side.
_ASKED_AT_ONCE = 32
# An entry of a large model may take some seconds. Whoever waits gives up earlier.
_LONGEST_S = 10.0


class S3Blobs(BlobStore):
    """See `BlobStore`. Each wait for bytes of an entry may take `patience_s`. Calls end with their
    time-outs, and cannot be interrupted."""

    label = "s3"

    def __init__(self, address: S3Address, seal: Sealing) -> None:
        self.name, self.seal = str(address), seal
        # What the address does not name, such as credentials, comes from variables AWS_...
        config: dict[str, Any] = {
            "endpoint": address.endpoint,
            "region": address.region,
            "access_key_id": address.access_key,
            "secret_access_key": address.secret_key,
        }
        options: Any = {
            # With TLS that are three round trips, or four. A prompt does not wait for all of them:
            # the next one finds the connection made.
            "connect_timeout": timedelta(seconds=4 * self.patience_s),
            "timeout": timedelta(seconds=_LONGEST_S),
            "allow_http": (address.endpoint or "").startswith("http://"),
        }
        connect = partial(
            S3Store,
            address.bucket,
            prefix=address.prefix or None,
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=_LONGEST_S)},
            **{name: value for name, value in config.items() if value is not None},
        )
        self._store = connect(client_options=options)
        # A prompt waits for these. A write is silent until all of it is sent, and a list is long.
        waiting: Any = {"read_timeout": timedelta(seconds=self.patience_s)}
        self._awaited = connect(client_options=options | waiting)
        self._askers = ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="paged-kv-s3")

    def sizes(self, names: Sequence[str]) -> list[int]:
        return list(self._askers.map(self._size, names))

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[Buffer]:
        return list(self._askers.map(self._get, wanted))

    def put(
        self, entries: Sequence[tuple[str, Sequence[Buffer]]], keep: Collection[str] = ()
    ) -> list[Outcome]:
        for name, data in entries:
            with _faults():
                obstore.put(self._store, FOLDER + name, b"".join(data), use_multipart=False)
            self.written = self.written.plus(sum(map(len, data)))
        return [Outcome.STORED] * len(entries)

    def entries(self) -> Iterator[Blob]:
        with _faults():
            found = [each for some in obstore.list(self._store, FOLDER) for each in some]
        for each in sorted(found, key=lambda each: each["last_modified"]):
            name, used = each["path"].rpartition("/")[2], each["last_modified"].timestamp()
            yield Blob(name, each["size"], int(used * 1e9))

    def remove(self, names: Sequence[str]) -> None:
        with _faults():
            obstore.delete(self._store, [FOLDER + name for name in names])

    def close(self) -> None:
        self._askers.shutdown(wait=False, cancel_futures=True)

    def _get(self, wanted: tuple[str, int]) -> Buffer:
        name, nbytes = wanted
        with _faults():
            try:
                data = obstore.get_range(self._awaited, FOLDER + name, start=0, length=nbytes)
            except FileNotFoundError:
                return b""
            return memoryview(data)

    def _size(self, name: str) -> int:
        with _faults():
            try:
                return obstore.head(self._awaited, FOLDER + name)["size"]
            except FileNotFoundError:
                return 0


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError, ValueError, RuntimeError) as error:
        raise RemoteFault(error) from None
