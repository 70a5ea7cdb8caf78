"""Finds the stored blocks that a prompt can begin with.

The lookup finds full blocks by their digests, one after the other. A last block can have any number
of tokens, so it asks the index for the token counts of the blocks after each block.

As in memory, a prompt can also reuse the first tokens of a block that continues differently, for
example with an answer, unless that block is quantised. So the lookup also asks the index for the
blocks with the longest common prefix. A stored state belongs after its block's last token; no
prompt can resume from it earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.allocator.ring import Ring
from paged_kv.store.keys import EntryPlace, Link

CHECKPOINT = "checkpoint"
"""The part of a block that holds the states of layers without pages after its last token."""


class BlockLookup(Protocol):
    """Looks up the blocks stored after a block, by its digest. Both may raise sqlite3.Error."""

    def children(self, parent: str) -> list[tuple[int, str]]:
        """Token counts and keys of the entries whose block follows `parent`."""
        ...

    def closest(self, parent: str, tokens: Sequence[int]) -> Iterable[tuple[int, ...]]:
        """The tokens of some blocks that follow `parent`, with those that have the longest common
        prefix with `tokens` among them."""
        ...


@dataclass(frozen=True)
class Union:
    """Several lookups as one."""

    lookups: Sequence[BlockLookup]

    def children(self, parent: str) -> list[tuple[int, str]]:
        return list({each for lookup in self.lookups for each in lookup.children(parent)})

    def closest(self, parent: str, tokens: Sequence[int]) -> Iterable[tuple[int, ...]]:
        return [each for lookup in self.lookups for each in lookup.closest(parent, tokens)]


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
        splits_full_blocks: whether it can resume within a full block: not if those are quantised.
    """

    root: Link
    tokens: Sequence[int]
    held: int
    beyond: int
    parts: tuple[str, ...]
    needs_checkpoint: bool
    page_size: int
    rings: tuple[tuple[str, Ring], ...] = ()
    splits_full_blocks: bool = True


@dataclass(frozen=True)
class Stored:
    """Stored blocks that a prompt can begin with. The last one may hold tokens of another prompt.

    Attributes:
        links: all blocks, with those that are held; only the last may be partly filled.
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


@dataclass(frozen=True)
class _Level:
    """The blocks stored after a path of a prompt's blocks.

    Attributes:
        path: the path, from the root on.
        there: the keys of the entries after its last block.
        exact: blocks that hold the prompt's next tokens and no others; the shortest first.
    """

    path: tuple[Link, ...]
    there: Collection[str]
    exact: Sequence[Link]


def find(wanted: Wanted, stored: BlockLookup, without: Collection[str] = ()) -> Stored | None:
    """The stored blocks that hold the longest prefix of a prompt, ignoring the entries `without`;
    None if no stored block is useful.

    Raises:
        sqlite3.Error: the index cannot be read.
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


def _levels(wanted: Wanted, stored: BlockLookup, without: Collection[str]) -> Iterator[_Level]:
    """The levels after the root and after each full block of the prompt's tokens."""
    path: tuple[Link, ...] = (wanted.root,)
    while True:
        left = _left(wanted, path[-1])
        behind = [each for each in stored.children(path[-1].digest) if each[1] not in without]
        there = {key for _, key in behind}
        # A held block, and one without parts, need not be stored: try the full size as well.
        counts = {count for count, _ in behind} | {wanted.page_size}
        fitting = [path[-1].then(left[:n]) for n in sorted(counts) if 0 < n <= len(left)]
        exact = [link for link in fitting if _has_pages(wanted, link, there)]
        yield _Level(path, there, exact)
        if not exact or len(exact[-1].tokens) < wanted.page_size:
            return
        path = (*path, exact[-1])


def _ends(wanted: Wanted, stored: BlockLookup, level: _Level) -> list[Link]:
    """The blocks of a level that may end a hit, those with most of the prompt's tokens first."""
    before, left = level.path[-1], _left(wanted, level.path[-1])
    ends = {link: len(link.tokens) for link in level.exact}
    # Held blocks match the prompt exactly, so only blocks after them may match in part.
    if not wanted.needs_checkpoint and before.end >= wanted.held:
        for tokens in stored.closest(before.digest, left):
            common, link = common_prefix(tokens, left), before.then(tokens)
            is_split = common < len(tokens) == wanted.page_size
            if is_split and not wanted.splits_full_blocks:
                continue
            if common and _has_pages(wanted, link, level.there):
                ends[link] = common
    useful = [link for link in ends if before.end + ends[link] > wanted.beyond]
    return sorted(useful, key=ends.__getitem__, reverse=True)


def _left(wanted: Wanted, link: Link) -> Sequence[int]:
    """The prompt's next tokens after a block, at most one block of them."""
    return wanted.tokens[link.end : link.end + wanted.page_size]


def _has_pages(wanted: Wanted, link: Link, there: Collection[str]) -> bool:
    return all(place.key in there for place in _needed_of_all(wanted, (link,)))


def _needed_of_all(wanted: Wanted, links: Sequence[Link]) -> list[EntryPlace]:
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


READ_AHEAD = 8

Item = TypeVar("Item")
Reading = TypeVar("Reading")
Result = TypeVar("Result")


def read_ahead(
    items: Iterable[Item],
    start: Callable[[Item], Reading],
    finish: Callable[[Reading, Item], Result | None],
) -> Iterator[Result | None]:
    """What `finish` returns for each item, in order. It is called when its turn comes; `start` is
    called earlier. Yields None for an item that cannot be read, and ends."""
    coming = iter(items)
    started = deque((item, start(item)) for item in islice(coming, READ_AHEAD))
    while started:
        item, reading = started.popleft()
        result = finish(reading, item)
        yield result
        if result is None:
            return
        started.extend((item, start(item)) for item in islice(coming, 1))
