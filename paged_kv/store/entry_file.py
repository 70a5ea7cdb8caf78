"""Encodes and decodes page files: safetensors, which other programs can read.

    tensors     "tokens", int64 [n], and the arrays of the entry
    metadata    format, version, checksum, the fields of the key, notes

The checksum is xxh3_64 of the whole file with the checksum's digits set to zeros, so it covers
every byte. It detects damage. Each read also compares the key, and so detects a sound file of
another entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save
from xxhash import xxh3_64

from paged_kv.store.errors import InvalidEntry, NewerVersion, OtherEntry
from paged_kv.store.keys import EntryPlace, Fields, Link, token_bytes

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


@dataclass(frozen=True, eq=False)
class Entry:
    """The content of a file.

    Attributes:
        place: gives its key.
        arrays: uint16 or uint8 of any shape, by name.
        notes: text that says how to read the arrays.
    """

    place: EntryPlace
    arrays: Mapping[str, Array]
    notes: str

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def encode(entry: Entry) -> list[Buffer]:
    """The bytes of an entry's file, in pieces."""
    place, link = entry.place, entry.place.link
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "checksum": _UNKNOWN,
        "key": place.key,
        "parent": link.parent,
        "start": str(link.start),
        "check": link.check,
        "part": place.part,
        "notes": entry.notes,
        **{_IDENTITY + name: value for name, value in link.identity},
    }
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
        place = _place(metadata, tuple(arrays.pop("tokens").tolist()))
        entry = Entry(place, arrays, metadata["notes"])
    except (KeyError, TypeError, ValueError) as error:
        # Only a forged file has the right checksum and a wrong header.
        raise InvalidEntry(f"the header lacks something: {error!r}") from None
    if key is not None and place.key != key:
        raise OtherEntry(f"the file holds entry {place.key}")
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


def _place(metadata: Mapping[str, str], tokens: tuple[int, ...]) -> EntryPlace:
    link = Link(
        _identity(metadata),
        metadata["parent"],
        int(metadata["start"]),
        tokens,
        metadata["check"],
    )
    return EntryPlace(link, metadata["part"])


def _identity(metadata: Mapping[str, str]) -> Fields:
    """The fields of the identity, sorted for comparison: a file may have them in any order."""
    return tuple(
        sorted(
            (name.removeprefix(_IDENTITY), value)
            for name, value in metadata.items()
            if name.startswith(_IDENTITY)
        )
    )


def _checksum(header: bytes, rest: memoryview) -> str:
    digest = xxh3_64(header)
    digest.update(rest)
    return digest.hexdigest()
