"""What of a prompt is stored.

Full blocks are found by their digests, one after the other. A block that ends before it is full can
have ended anywhere, so the index is asked how many tokens there are behind a block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from paged_kv.store.keys import Link, Place

CHECKPOINT = "checkpoint"
"""The part of a block that holds what layers need that cannot begin just anywhere."""

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
    """

    root: Link
    tokens: Sequence[int]
    held: int
    beyond: int
    parts: tuple[str, ...]
    needs_checkpoint: bool
    page_size: int


@dataclass(frozen=True)
class Stored:
    """Stored blocks that a prompt can begin with.

    Attributes:
        links: all blocks, those that are held included; only the last may not be full.
        places: what is to be read, a block's parts side by side, in the order of the blocks.
        checkpoint: what is to be read besides, if one is needed.
    """

    links: tuple[Link, ...]
    places: tuple[Place, ...]
    checkpoint: Place | None

    @property
    def num_tokens(self) -> int:
        """How much of the prompt that is."""
        return self.links[-1].end

    @property
    def keys(self) -> tuple[str, ...]:
        """Everything that is to be read."""
        last = () if self.checkpoint is None else (self.checkpoint,)
        return tuple([place.key for place in (*self.places, *last)])


def find(wanted: Wanted, children: Children, without: Collection[str] = ()) -> Stored | None:
    """The longest stored beginning of a prompt, leaving out the entries `without`; None if it is
    of no use.

    Raises:
        sqlite3.Error: the index cannot be asked.
    """
    best: tuple[Link, ...] = ()
    path: list[Link] = []
    link: Link | None = wanted.root
    while link is not None:
        left = min(wanted.page_size, len(wanted.tokens) - link.end)
        behind = [each for each in children(link.digest) if each[1] not in without]
        there = {key for _, key in behind}
        # In a block that is held, or has no parts, only a checkpoint can be of use.
        ends = {count for count, _ in behind if 0 < count <= left}
        following = None
        for count in sorted(ends | ({left} if left == wanted.page_size else set())):
            child = link.then(wanted.tokens[link.end : link.end + count])
            if not _has_pages(wanted, child, there):
                continue
            if count == wanted.page_size:
                following = child
            if child.end > wanted.beyond and _can_end(wanted, child, there):
                best = (*path, child)
        link = following
        if link is not None:
            path.append(link)
    return _stored(wanted, best) if best else None


def _has_pages(wanted: Wanted, link: Link, there: Collection[str]) -> bool:
    return link.end <= wanted.held or all(Place(link, part).key in there for part in wanted.parts)


def _can_end(wanted: Wanted, link: Link, there: Collection[str]) -> bool:
    return not wanted.needs_checkpoint or Place(link, CHECKPOINT).key in there


def _stored(wanted: Wanted, links: tuple[Link, ...]) -> Stored:
    places = [
        Place(link, part) for link in links if link.end > wanted.held for part in wanted.parts
    ]
    checkpoint = Place(links[-1], CHECKPOINT) if wanted.needs_checkpoint else None
    return Stored(links, tuple(places), checkpoint)
