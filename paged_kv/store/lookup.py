"""Finds the stored blocks that a prompt can begin with, and counts how often prompts begin so.

Only full blocks are stored. So the prompt's tokens name everything that may be of use, and one
question to each tier says what of it is there. A stored state belongs after its block's last token.

Most prompts come once, and what is written for them only wears the disk. So each block of a prompt
is counted when it is looked up, and can be written once it was seen often enough. A block that
nobody has looked up yet, such as that of an answer, was seen once when it is first cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from paged_kv.allocator.ring import Ring
from paged_kv.lru import LRU
from paged_kv.store.keys import EntryPlace, Link

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
        """How many tokens the blocks hold."""
        return self.links[-1].end

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of everything to read."""
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
        at_end = _needed_at_end(wanted, links)
        if has_all(at_end):
            return Stored(tuple(links), (*_pages(wanted, links), *at_end))
        links.pop()
    return None


def _pages(wanted: Wanted, links: Iterable[Link]) -> list[EntryPlace]:
    return [
        EntryPlace(link, part) for link in links if link.end > wanted.held for part in wanted.parts
    ]


def _needed_at_end(wanted: Wanted, links: Sequence[Link]) -> list[EntryPlace]:
    in_rings = [
        EntryPlace(links[block], part)
        for part, ring in wanted.rings
        for block in ring.held(len(links) - 1)
    ]
    states = [EntryPlace(links[-1], CHECKPOINT)] if wanted.needs_checkpoint else []
    return in_rings + states


class LookupCounts:
    """How often blocks were looked up, by their digests. One thread uses it at a time.

    Args:
        saved: what `unsaved` returned in earlier processes, joined.
    """

    def __init__(self, saved: bytes = b"") -> None:
        self._counts: LRU[int, int] = LRU(MOST_COUNTED)
        self._unsaved: list[int] = []
        for block in _words(saved):
            self._count(block)

    def __getitem__(self, digest: str) -> int:
        """How often a block was looked up."""
        return self._counts.get(_word(digest), 0)

    def record(self, digest: str) -> None:
        """Count a block."""
        self._count(_word(digest))
        self._unsaved.append(_word(digest))
        del self._unsaved[:-MOST_SAVED]

    @property
    def num_unsaved(self) -> int:
        """How many look-ups `unsaved` would return."""
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


def _words(saved: bytes) -> array[int]:
    words = array("Q")
    words.frombytes(saved[: len(saved) // 8 * 8][-SAVED_BYTES:])
    return words
