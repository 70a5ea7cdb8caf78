"""The bytes of an entry: a safetensors file, which other programs can read, and a seal on servers.

    tensors     "tokens", int64 [n], and the arrays of the entry
    metadata    format, version, checksum, the fields of the key, notes

The checksum is xxh3_64 of the whole file with the checksum's digits set to zeros, so it covers
every byte. It detects damage. Each read also compares the key, and so detects a sound file of
another entry.

On a server that others can write to, names and entries are sealed:

    name     H(name key, the entry's key)
    entry    magic, H(data key, name and payload), zeros up to 64 bytes, the file as payload

H is keyed BLAKE2b; both keys are derived from a secret that all machines share. The digest is
verified before anything else is done with an entry, so whoever can write to the server but cannot
read the secret can remove entries, and no more. Names are keyed too: they do not tell which prompt
an entry belongs to. The content is not encrypted. Without a secret, names and digests are those of
an empty one: they detect damage, not forgery.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save
from xxhash import xxh3_64

from paged_kv.store.keys import EntryPlace, Link, token_bytes

FORMAT, VERSION = "paged-kv page", "1"
SUFFIX = ".safetensors"

# A header has about 100 bytes a layer; one that claims more than this is damaged.
MAX_HEADER_BYTES = 1 << 20

Buffer = bytes | memoryview
Array = npt.NDArray[Any]

_UNKNOWN = "0" * 16
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{16})"')
_IDENTITY = "identity."
_DTYPES = {"I64": "<i8", "U16": "<u2", "U8": "<u1"}

# A safetensors file behind a header of 64 bytes keeps its alignment.
HEADER_BYTES = 64
_MAGIC = b"pagedkv1"
_DIGEST_BYTES = 32
_NO_BYTES = bytes(HEADER_BYTES - len(_MAGIC) - _DIGEST_BYTES)


class InvalidEntry(ValueError):
    """An entry that cannot be used: it is damaged, cut off, or of another kind."""

    kind = "damaged"


class NewerVersion(InvalidEntry):
    """An entry in a format that this version does not read."""

    kind = "other version"


class OtherEntry(InvalidEntry):
    """A sound entry, but not the one that was asked for."""

    kind = "other entry"


class Forged(InvalidEntry):
    """An entry that was not written with the secret, or was damaged since."""

    kind = "forged or damaged"


class WrongSize(InvalidEntry):
    """An entry that claims more bytes than any page has, or fewer than its header."""

    kind = "wrong size"


class Gone(InvalidEntry):
    """An entry that another process has evicted."""

    kind = "gone"


@dataclass(frozen=True, eq=False)
class Entry:
    """The content of a file: arrays of uint16 or uint8 of any shape, by name, and notes that say
    how to read them."""

    place: EntryPlace
    arrays: Mapping[str, Array]
    notes: str

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def encode(entry: Entry) -> list[Buffer]:
    """The bytes of an entry's file, in pieces."""
    place, link = entry.place, entry.place.link
    metadata = {"format": FORMAT, "version": VERSION, "checksum": _UNKNOWN, "key": place.key}
    metadata |= {"parent": link.parent, "start": str(link.start)}
    metadata |= {"part": place.part, "notes": entry.notes}
    metadata |= {_IDENTITY + name: value for name, value in link.identity}
    tokens = np.frombuffer(token_bytes(link.tokens), "<i8")
    data = memoryview(save({**entry.arrays, "tokens": tokens}, metadata))
    end = _header_end(data)
    header, rest = bytes(data[:end]), data[end:]
    (found,) = _CHECKSUM.finditer(header)
    digits = _checksum(header, rest).encode()
    return [header[: found.start(1)] + digits + header[found.end(1) :], rest]


def decode(data: Buffer, key: str | None) -> Entry:
    """The entry in the bytes of a key's file; None takes that of any key.

    Raises:
        InvalidEntry: the bytes are damaged, of another version, or another entry's.
    """
    data = memoryview(data)
    header, tensors, metadata = _header(data)
    rest = data[len(header) :]
    (found,) = _CHECKSUM.finditer(header)
    blank = header[: found.start(1)] + _UNKNOWN.encode() + header[found.end(1) :]
    if _checksum(blank, rest) != metadata["checksum"]:
        raise InvalidEntry("the checksum is wrong")
    try:
        arrays = {name: _array(rest, about) for name, about in tensors.items()}
        # Sorted for comparison: a file may have the fields in any order.
        fields = sorted(each for each in metadata.items() if each[0].startswith(_IDENTITY))
        identity = tuple([(name.removeprefix(_IDENTITY), value) for name, value in fields])
        tokens = tuple(arrays.pop("tokens").tolist())
        link = Link(identity, metadata["parent"], int(metadata["start"]), tokens)
        entry = Entry(EntryPlace(link, metadata["part"]), arrays, metadata["notes"])
    except (KeyError, TypeError, ValueError) as error:
        # Only a forged file has the right checksum and a wrong header.
        raise InvalidEntry(f"the header lacks something: {error!r}") from None
    if key is not None and entry.place.key != key:
        raise OtherEntry(f"the file holds entry {entry.place.key}")
    return entry


def _header(data: memoryview) -> tuple[bytes, dict[str, Any], dict[str, str]]:
    """The bytes before the tensors, and the tensors' descriptions and the metadata in them."""
    header = bytes(data[: _header_end(data)])
    try:
        tensors = json.loads(header[8:])
        metadata = tensors.pop("__metadata__")
        known = metadata["format"] == FORMAT
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidEntry(f"it cannot be read: {error!r}") from None
    if not known:
        raise InvalidEntry(f"its format is {metadata['format']!r}")
    if metadata.get("version") != VERSION:
        raise NewerVersion(
            f"it has format version {metadata.get('version')!r}, and this paged_kv reads {VERSION}"
        )
    if len(_CHECKSUM.findall(header)) != 1 or "checksum" not in metadata:
        raise InvalidEntry("it has no checksum")
    return header, tensors, metadata


def _header_end(data: memoryview) -> int:
    end = 8 + int.from_bytes(data[:8], "little")
    if not 8 < end <= min(len(data), MAX_HEADER_BYTES):
        raise InvalidEntry(f"it is cut off, or not a safetensors file: {len(data)} bytes")
    return end


def _array(data: memoryview, about: dict[str, Any]) -> Array:
    """One tensor, a view of the file's bytes."""
    start, end = about["data_offsets"]
    return np.frombuffer(data[start:end], _DTYPES[about["dtype"]]).reshape(about["shape"])


def _checksum(header: bytes, rest: memoryview) -> str:
    digest = xxh3_64(header)
    digest.update(rest)
    return digest.hexdigest()


class Sealing:
    """Names and entries of a place. Those of a folder, which only its owner can enter, are keys and
    files as they are.

    Attributes:
        header_bytes: what an entry takes more than its file.
    """

    header_bytes = 0

    def name(self, key: str) -> str:
        """The name of an entry: 64 hexadecimal digits."""
        return key

    def sealed(self, name: str, payload: Sequence[Buffer]) -> list[Buffer]:
        """An entry to write, in pieces, of the pieces of its file."""
        return [*payload]

    def opened(self, name: str, data: Buffer) -> memoryview:
        """The file in an entry.

        Raises:
            Forged: it was not written under this name with the secret.
        """
        return memoryview(data)


class Seal(Sealing):
    """Makes names and entries with one secret, and verifies them."""

    header_bytes = HEADER_BYTES

    def __init__(self, secret: bytes) -> None:
        self._name_key = _derived(secret, b"names")
        self._data_key = _derived(secret, b"entries")

    def name(self, key: str) -> str:
        return blake2b(key.encode(), key=self._name_key, digest_size=_DIGEST_BYTES).hexdigest()

    def sealed(self, name: str, payload: Sequence[Buffer]) -> list[Buffer]:
        return [_MAGIC + self._digest(name, payload) + _NO_BYTES, *payload]

    def opened(self, name: str, data: Buffer) -> memoryview:
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


UNSEALED = Sealing()


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return blake2b(secret, person=b"paged-kv", salt=purpose, digest_size=64).digest()
