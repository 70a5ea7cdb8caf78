"""Names and digests of entries on a server that others can write to.

    name     H(name key, the entry's key)
    entry    magic, H(data key, name and payload), zeros up to 64 bytes, payload

H is keyed BLAKE2b; both keys are derived from a secret that all machines share. The digest is
verified before anything else is done with an entry, so whoever can write to the server but cannot
read the secret can remove entries, and no more. Names are keyed too: they do not tell which prompt
an entry belongs to. The content is not encrypted.

Without a secret, names and digests are those of an empty one: they detect damage, not forgery.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from paged_kv.store.entry_file import Buffer
from paged_kv.store.errors import InvalidEntry

LEAST_SECRET_BYTES = 32
# A safetensors file behind a header of 64 bytes keeps its alignment.
HEADER_BYTES = 64
_MAGIC = b"pagedkv1"
_DIGEST_BYTES = 32
_NO_BYTES = bytes(HEADER_BYTES - len(_MAGIC) - _DIGEST_BYTES)


class Forged(InvalidEntry):
    """An entry that was not written with the secret, or was damaged since."""

    kind = "forged or damaged"


def read_secret(file: Path) -> bytes:
    """The secret in a file: its whole content.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too short; the message names the file and says nothing of its content.
    """
    secret = file.read_bytes().strip()
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(
            f"the secret in {file} has {len(secret)} bytes, and at least {LEAST_SECRET_BYTES} are "
            f"needed: head -c 32 /dev/urandom | base64 > {file}"
        )
    return secret


class Seal:
    """Makes names and entries with one secret, and verifies them.

    Attributes:
        header_bytes: what an entry takes more than its payload.
    """

    header_bytes = HEADER_BYTES

    def __init__(self, secret: bytes) -> None:
        self._name_key = _derived(secret, b"names")
        self._data_key = _derived(secret, b"entries")

    def name(self, key: str) -> str:
        """The name of an entry on a server: 64 hexadecimal digits."""
        return blake2b(key.encode(), key=self._name_key, digest_size=_DIGEST_BYTES).hexdigest()

    def sealed(self, name: str, payload: Sequence[Buffer]) -> list[Buffer]:
        """An entry for a server, in pieces."""
        return [_MAGIC + self._digest(name, payload) + _NO_BYTES, *payload]

    def opened(self, name: str, data: Buffer) -> memoryview:
        """The payload of an entry.

        Raises:
            Forged: it was not written under this name with the secret.
        """
        data = memoryview(data)
        head, payload = bytes(data[:HEADER_BYTES]), data[HEADER_BYTES:]
        right = _MAGIC + self._digest(name, [payload]) + _NO_BYTES
        if not hmac.compare_digest(head, right):
            raise Forged("its digest is not the secret's")
        return payload

    def _digest(self, name: str, payload: Sequence[Buffer]) -> bytes:
        digest = blake2b(name.encode(), key=self._data_key, digest_size=_DIGEST_BYTES)
        for part in payload:
            digest.update(part)
        return digest.digest()


class Unsealed:
    """For a folder that only its owner can enter: a checksum in the payload detects damage."""

    header_bytes = 0

    def name(self, key: str) -> str:
        """The entry's key."""
        return key

    def sealed(self, name: str, payload: Sequence[Buffer]) -> list[Buffer]:
        """The payload."""
        return [*payload]

    def opened(self, name: str, data: Buffer) -> memoryview:
        """The payload."""
        return memoryview(data)


Sealing = Seal | Unsealed
UNSEALED = Unsealed()


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return blake2b(secret, person=b"paged-kv", salt=purpose, digest_size=64).digest()
