"""Keys of stored blocks: a chained sha256 of everything that determines a block's content.

    root     = H("identity", fields of the identity)
    block    = H("block", digest of the block before or of the root, token ids)
    file     = H("file", digest of the block, the part of it that the file holds)

H hashes each tag and value after its length, so that different lists of fields give different
bytes. Token ids are signed 64-bit numbers, little-endian: image tokens have negative ids.

Only full blocks are stored. So the prompt's tokens name everything that may be of use, and one
question to each tier says what of it is there. A stored state belongs after its block's last token.

Most prompts come once, and what is written for them only wears the disk. So each block of a prompt
is counted when it is looked up, and can be written once it was seen often enough. A block that
nobody has looked up yet, such as that of an answer, was seen once when it is first cached.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256

from paged_kv.allocator.ring import Ring
from paged_kv.lru import LRU

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
        rotation: what keys and values are rotated by, and the bits of the codes of `q4`.
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
    """

    identity: Fields
    parent: str
    start: int
    tokens: tuple[int, ...]

    @classmethod
    def root(cls, identity: Identity) -> Link:
        """The parent of a prompt's first block."""
        return cls(identity.as_fields(), "", 0, ())

    @cached_property
    def digest(self) -> str:
        """The sha256 of the block, in hexadecimal.

        Raises:
            ValueError: a token id is not a signed 64-bit integer.
        """
        if not self.parent:
            return _digest("identity", *[part.encode() for pair in self.identity for part in pair])
        return _digest("block", self.parent.encode(), token_bytes(self.tokens))

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def then(self, tokens: Sequence[int]) -> Link:
        """The block of these tokens after this one."""
        return Link(self.identity, self.digest, self.end, tuple(tokens))


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


CHECKPOINT = "checkpoint"
"""The part of a block that holds the states of layers without pages after its last token."""

# Counts are kept for the latest blocks: 16 million tokens of prompts, in about 8 MB of memory.
MOST_COUNTED = 1 << 16
# Of these so many outlive the process, in a file of 128 kB.
MOST_SAVED = 1 << 14
SAVED_BYTES = 8 * MOST_SAVED


@dataclass(frozen=True)
class Wanted:
    """A prompt to look up.

    Attributes:
        root: the parent of its first block.
        tokens: of the whole prompt.
        held: the number of its first tokens that are in memory, in whole blocks.
        beyond: a hit is useful only if it is longer than this many tokens.
        parts: the parts needed of every block that is not held.
        needs_checkpoint: whether it can resume only where a checkpoint is stored.
        page_size: tokens a block.
        rings: the part and ring of each group with a window: that part is needed of all blocks in
            the ring at the hit's end, held or not.
    """

    root: Link
    tokens: Sequence[int]
    held: int
    beyond: int
    parts: tuple[str, ...]
    needs_checkpoint: bool
    page_size: int
    rings: tuple[tuple[str, Ring], ...] = ()

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The prompt's full blocks."""
        links = [self.root]
        while links[-1].end + self.page_size <= len(self.tokens):
            end = links[-1].end
            links.append(links[-1].then(self.tokens[end : end + self.page_size]))
        return tuple(links[1:])

    @cached_property
    def places(self) -> tuple[EntryPlace, ...]:
        """Everything that a hit may need, the first blocks first."""
        rings = [part for part, _ in self.rings]
        places = []
        for link in self.links:
            pages = self.parts if link.end > self.held else ()
            states = [CHECKPOINT] if self.needs_checkpoint and link.end > self.beyond else []
            places += [EntryPlace(link, part) for part in (*pages, *rings, *states)]
        return tuple(places)


@dataclass(frozen=True)
class Stored:
    """Stored blocks that a prompt can begin with.

    Attributes:
        links: all blocks, with those that are held.
        places: what to read: the blocks' parts, in order; the parts of each ring, in the order of
            its entries; the checkpoint, if one is needed.
    """

    links: tuple[Link, ...]
    places: tuple[EntryPlace, ...]

    @property
    def num_tokens(self) -> int:
        return self.links[-1].end

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple([place.key for place in self.places])

    @property
    def end_key(self) -> str:
        """The key of a part of the last block: a lookup without it does not return this again."""
        return [place.key for place in self.places if place.link == self.links[-1]][-1]


def find(wanted: Wanted, there: Container[str], without: Container[str] = ()) -> Stored | None:
    """The longest beginning of a prompt of which everything needed is `there` and not in `without`,
    both keys of entries; None if none is useful."""

    def has_all(places: Iterable[EntryPlace]) -> bool:
        return all(place.key in there and place.key not in without for place in places)

    links: list[Link] = []
    for link in wanted.links:
        if not has_all(_pages(wanted, [link])):
            break
        links.append(link)
    while links and links[-1].end > wanted.beyond:
        at_end = [
            EntryPlace(links[block], part)
            for part, ring in wanted.rings
            for block in ring.held(len(links) - 1)
        ]
        if wanted.needs_checkpoint:
            at_end.append(EntryPlace(links[-1], CHECKPOINT))
        if has_all(at_end):
            return Stored(tuple(links), (*_pages(wanted, links), *at_end))
        links.pop()
    return None


def _pages(wanted: Wanted, links: Iterable[Link]) -> list[EntryPlace]:
    return [
        EntryPlace(link, part) for link in links if link.end > wanted.held for part in wanted.parts
    ]


class LookupCounts:
    """How often blocks were looked up, by their digests. One thread uses it at a time. `saved` is
    what `unsaved` returned in earlier processes, joined."""

    def __init__(self, saved: bytes = b"") -> None:
        self._counts: LRU[int, int] = LRU(MOST_COUNTED)
        self._unsaved: list[int] = []
        words = array("Q")
        words.frombytes(saved[: len(saved) // 8 * 8][-SAVED_BYTES:])
        for block in words:
            self._count(block)

    def __getitem__(self, digest: str) -> int:
        return self._counts.get(_word(digest), 0)

    def record(self, digest: str) -> None:
        self._count(_word(digest))
        self._unsaved.append(_word(digest))
        del self._unsaved[:-MOST_SAVED]

    @property
    def num_unsaved(self) -> int:
        return len(self._unsaved)

    def unsaved(self) -> bytes:
        """The look-ups since the last call, to append to the saved ones."""
        words, self._unsaved = array("Q", self._unsaved), []
        return words.tobytes()

    def _count(self, block: int) -> None:
        self._counts[block] = self._counts.get(block, 0) + 1


def _word(digest: str) -> int:
    """64 bits tell blocks apart: two that are taken for one are written early."""
    return int(digest[:16], 16)
