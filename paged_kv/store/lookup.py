"""What of a prompt is stored.

Full blocks are found by their digests, one after the other. A block that ends before it is full can
have ended anywhere, so the index is asked how many tokens there are behind a block.

A prompt can begin with a part of a block too, as in memory: with the first tokens of one that holds
an answer behind them, or goes on otherwise. So the index is also asked which blocks begin most like
the prompt goes on. States are those behind a block's last token, and are of no use within it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.allocator.ring import Ring
from paged_kv.store.keys import Link, Place

CHECKPOINT = "checkpoint"
"""The part of a block that holds the states of layers without pages, as they are behind it."""


class Behind(Protocol):
    """What is stored behind a block, by its digest. Both may raise sqlite3.Error."""

    def children(self, parent: str) -> list[tuple[int, str]]:
        """How many tokens the entries have, and their keys."""
        ...

    def closest(self, parent: str, tokens: Sequence[int]) -> Iterable[tuple[int, ...]]:
        """The tokens of some blocks, those that have most first tokens in common with `tokens`
        among them."""
        ...


@dataclass(frozen=True)
class Wanted:
    """A prompt that is to begin with stored blocks.

    Attributes:
        root: what its first block comes behind.
        tokens: all of it.
        held: its first tokens that are in memory, in whole blocks.
        beyond: only what ends behind so many tokens is of use.
        parts: what is needed of every block that is not held.
        needs_checkpoint: whether it can only go on where a checkpoint is stored.
        page_size: tokens a block.
        rings: what is needed of the blocks that are in a ring at its end, held or not.
    """

    root: Link
    tokens: Sequence[int]
    held: int
    beyond: int
    parts: tuple[str, ...]
    needs_checkpoint: bool
    page_size: int
    rings: tuple[tuple[str, Ring], ...] = ()


@dataclass(frozen=True)
class Stored:
    """Stored blocks that a prompt can begin with; of the last one maybe not all tokens are its.

    Attributes:
        links: all blocks, those that are held included; only the last may not be full.
        places: what is to be read: the blocks' parts, in their order; the parts of each ring, in
            the order of its entries; the checkpoint, if one is needed.
    """

    links: tuple[Link, ...]
    places: tuple[Place, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens they hold."""
        return self.links[-1].end

    @property
    def keys(self) -> tuple[str, ...]:
        """Everything that is to be read."""
        return tuple([place.key for place in self.places])

    @property
    def end_key(self) -> str:
        """Something that is to be read of the last block: without it, this is not found again."""
        return [place.key for place in self.places if place.link == self.links[-1]][-1]


@dataclass(frozen=True)
class _Level:
    """What is stored behind the first blocks of a prompt.

    Attributes:
        path: those, from the root on.
        there: the keys of what is stored behind the last of them.
        exact: blocks that hold what the prompt goes on with, and no other tokens; the shortest
            first.
    """

    path: tuple[Link, ...]
    there: Collection[str]
    exact: Sequence[Link]


def find(wanted: Wanted, stored: Behind, without: Collection[str] = ()) -> Stored | None:
    """The stored blocks that hold the longest beginning of a prompt, leaving out the entries
    `without`; None if there are none that are of use.

    Raises:
        sqlite3.Error: the index cannot be asked.
    """
    levels = list(_levels(wanted, stored, without))
    there = {key for level in levels for key in level.there}
    for level in reversed(levels):
        if level.path[-1].end + wanted.page_size <= wanted.beyond:
            break
        for last in _ends(wanted, stored, level):
            links = (*level.path[1:], last)
            at_end = _needed_at_end(wanted, links)
            if all(place.key in there for place in at_end):
                return Stored(links, (*_needed_of_all(wanted, links), *at_end))
    return None


def _levels(wanted: Wanted, stored: Behind, without: Collection[str]) -> Iterator[_Level]:
    """What is stored behind each full block that holds the prompt's tokens, and behind the root."""
    path: tuple[Link, ...] = (wanted.root,)
    while True:
        left = _left(wanted, path[-1])
        behind = [each for each in stored.children(path[-1].digest) if each[1] not in without]
        there = {key for _, key in behind}
        # In a block that is held, or has no parts, only what is needed at an end can be of use.
        counts = {count for count, _ in behind} | {wanted.page_size}
        fitting = [path[-1].then(left[:n]) for n in sorted(counts) if 0 < n <= len(left)]
        exact = [link for link in fitting if _has_pages(wanted, link, there)]
        yield _Level(path, there, exact)
        if not exact or len(exact[-1].tokens) < wanted.page_size:
            return
        path = (*path, exact[-1])


def _ends(wanted: Wanted, stored: Behind, level: _Level) -> list[Link]:
    """The blocks of a level with which the prompt may begin, those of most of its tokens first."""
    before, left = level.path[-1], _left(wanted, level.path[-1])
    ends = {link: len(link.tokens) for link in level.exact}
    # What is held instead of being read holds the prompt's own tokens.
    if not wanted.needs_checkpoint and before.end >= wanted.held:
        for tokens in stored.closest(before.digest, left):
            common, link = common_prefix(tokens, left), before.then(tokens)
            if common and _has_pages(wanted, link, level.there):
                ends[link] = common
    useful = [link for link in ends if before.end + ends[link] > wanted.beyond]
    return sorted(useful, key=ends.__getitem__, reverse=True)


def _left(wanted: Wanted, link: Link) -> Sequence[int]:
    """What a prompt goes on with behind a block, as far as it is in the next one."""
    return wanted.tokens[link.end : link.end + wanted.page_size]


def _has_pages(wanted: Wanted, link: Link, there: Collection[str]) -> bool:
    return all(place.key in there for place in _needed_of_all(wanted, (link,)))


def _needed_of_all(wanted: Wanted, links: Sequence[Link]) -> list[Place]:
    return [Place(link, part) for link in links if link.end > wanted.held for part in wanted.parts]


def _needed_at_end(wanted: Wanted, links: Sequence[Link]) -> list[Place]:
    in_rings = [
        Place(links[block], part)
        for part, ring in wanted.rings
        for block in ring.held(len(links) - 1)
    ]
    states = [Place(links[-1], CHECKPOINT)] if wanted.needs_checkpoint else []
    return in_rings + states
