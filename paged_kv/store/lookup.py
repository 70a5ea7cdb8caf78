"""What of a prompt is stored.

Full blocks are found by their digests, one after the other. A block that ends before it is full can
have ended anywhere, so the index is asked how many tokens there are behind a block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from paged_kv.allocator.ring import Ring
from paged_kv.store.keys import Link, Place

CHECKPOINT = "checkpoint"
"""The part of a block that holds the states of layers without pages, as they are behind it."""

Children = Callable[[str], list[tuple[int, str]]]


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
    """Stored blocks that a prompt can begin with.

    Attributes:
        links: all blocks, those that are held included; only the last may not be full.
        places: what is to be read: the blocks' parts, in their order; the parts of each ring, in
            the order of its entries; the checkpoint, if one is needed.
    """

    links: tuple[Link, ...]
    places: tuple[Place, ...]

    @property
    def num_tokens(self) -> int:
        """How much of the prompt that is."""
        return self.links[-1].end

    @property
    def keys(self) -> tuple[str, ...]:
        """Everything that is to be read."""
        return tuple([place.key for place in self.places])


def find(wanted: Wanted, children: Children, without: Collection[str] = ()) -> Stored | None:
    """The longest stored beginning of a prompt, leaving out the entries `without`; None if it is
    of no use.

    Raises:
        sqlite3.Error: the index cannot be asked.
    """
    there: set[str] = set()
    path: list[Link] = []
    # The blocks with which it may end, and how many come before each.
    ends: list[tuple[int, Link]] = []
    link: Link | None = wanted.root
    while link is not None:
        left = min(wanted.page_size, len(wanted.tokens) - link.end)
        behind = [each for each in children(link.digest) if each[1] not in without]
        there.update(key for _, key in behind)
        # In a block that is held, or has no parts, only what is needed at an end can be of use.
        counts = {count for count, _ in behind if 0 < count <= left}
        following = None
        for count in sorted(counts | ({left} if left == wanted.page_size else set())):
            child = link.then(wanted.tokens[link.end : link.end + count])
            if not _has_pages(wanted, child, there):
                continue
            if count == wanted.page_size:
                following = child
            if child.end > wanted.beyond:
                ends.append((len(path), child))
        link = following
        if link is not None:
            path.append(link)
    for before, child in reversed(ends):
        links = (*path[:before], child)
        at_end = _needed_at_end(wanted, links)
        if all(place.key in there for place in at_end):
            return Stored(links, (*_needed_of_all(wanted, links), *at_end))
    return None


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
