"""Keys of stored blocks: a chained sha256 of everything that determines a block's content.

    root     = H("identity", fields of the identity)
    block    = H("block", digest of the block before or of the root, token ids)
    file     = H("file", digest of the block, the part of it that the file holds)

H hashes each tag and value after its length, so that different lists of fields give different
bytes. Token ids are signed 64-bit numbers, little-endian: image tokens have negative ids.

A second chain hashes the same tokens with xxh3_128. It is stored and compared, so that even two
prompts with one sha256 are told apart.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256

from xxhash import xxh3_128_hexdigest

Salt = None | str | bytes | int | tuple["Salt", ...]
"""Separates users: None, text, bytes, a number, or a tuple of these."""

Fields = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Identity:
    """Everything besides the tokens that determines the content of pages.

    Attributes:
        model: the kind of model, for people to read.
        weights: fingerprint of all weights, with those of adapters.
        settings: fingerprint of the model's other settings: rope, scales of adapters, sizes.
        versions: of the libraries that compute.
        geometry: heads, head sizes, dtypes and windows of all layers.
        page_format: how pages hold numbers, and the formats they may be requantised to.
        rotation: what keys and values are rotated by, and whether keys have a centre.
        page_size: tokens a block.
        salt: separates users.
    """

    model: str
    weights: str
    settings: str
    versions: str
    geometry: str
    page_format: str
    rotation: str
    page_size: int
    salt: Salt = None

    def as_fields(self) -> Fields:
        """Names and values, sorted by name; of the salt only its digest."""
        named = {each.name: str(getattr(self, each.name)) for each in fields(self)}
        named["salt"] = sha256(salt_bytes(self.salt)).hexdigest()
        return tuple(sorted(named.items()))


@dataclass(frozen=True)
class Link:
    """One block of a prompt, chained to all blocks before it.

    Attributes:
        identity: the fields of the `Identity`.
        parent: the digest of the block before; empty for a root.
        start: the position of the first token.
        tokens: of this block; none in a root.
        check: xxh3_128 of the tokens of this and all blocks before.
    """

    identity: Fields
    parent: str
    start: int
    tokens: tuple[int, ...]
    check: str

    @classmethod
    def root(cls, identity: Identity) -> Link:
        """The parent of a prompt's first block."""
        return cls(identity.as_fields(), "", 0, (), "")

    @cached_property
    def digest(self) -> str:
        """The sha256 of the block, in hexadecimal."""
        if not self.parent:
            return _digest("identity", *[part.encode() for pair in self.identity for part in pair])
        return _digest("block", self.parent.encode(), token_bytes(self.tokens))

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    def then(self, tokens: Sequence[int]) -> Link:
        """The block of these tokens after this one.

        Raises:
            ValueError: a token id is not a signed 64-bit integer.
        """
        check = xxh3_128_hexdigest(self.check.encode() + token_bytes(tokens))
        return Link(self.identity, self.digest, self.end, tuple(tokens), check)


@dataclass(frozen=True)
class EntryPlace:
    """The part of a block that one file holds, such as the pages of one layer group."""

    link: Link
    part: str

    @cached_property
    def key(self) -> str:
        """Names the file: 64 hexadecimal digits."""
        return _digest("file", self.link.digest.encode(), self.part.encode())


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes to hash and store: int64, little-endian.

    Raises:
        ValueError: a token id is not a signed 64-bit integer.
    """
    try:
        numbers = array("q", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be signed 64-bit integers: {error}") from None
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def salt_bytes(salt: object) -> bytes:
    """A salt as bytes to hash; another type or value gives other bytes.

    Raises:
        ValueError: the salt's type has no bytes that are the same in another process.
    """
    match salt:
        case None:
            return b"none"
        case str():
            return b"text" + salt.encode("utf-8", "surrogatepass")
        case bytes():
            return b"bytes" + salt
        case int():
            return b"number" + str(int(salt)).encode()
        case tuple():
            return b"tuple" + b"".join(map(_with_length, map(salt_bytes, salt)))
    raise ValueError(
        f"a salt of type {type(salt).__name__} cannot be stored: use a string, bytes, an integer, "
        "None, or a tuple of these"
    )


def _digest(tag: str, *values: bytes) -> str:
    return sha256(b"".join(map(_with_length, (b"paged-kv", tag.encode(), *values)))).hexdigest()


def _with_length(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value
