"""The state of every block, as a string for each slab that is short where neighbours are alike.

    .  free       u  used by one       s  shared by several       c  cached, only kept

A run of n blocks alike is its letter and n, and n is left out where it is 1: "u3.c12".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from paged_kv.allocator.slabs import MAX_SLAB_PAGES, PAGE_BITS

if TYPE_CHECKING:
    from paged_kv.allocator.block_allocator import BlockAllocator

FREE, USED, SHARED, CACHED = ".usc"


@dataclass(frozen=True)
class SlabMap:
    """The blocks of a slab.

    Attributes:
        slab: its number in its group.
        page_format: of all its pages.
        states: a letter for each block.
    """

    slab: int
    page_format: str
    states: str


def block_map(allocator: BlockAllocator) -> Callable[[], list[SlabMap]]:
    """What makes the map of the blocks as they are now. Only this call needs the allocator to stand
    still, and it only copies; O(blocks), as is the other."""
    slabs = {slab: (each.name, n) for each in allocator.formats for slab, n in each.slabs.items()}
    counts, kept = dict(allocator.refs.counts), list(allocator.refs.kept)

    def states() -> list[SlabMap]:
        letters = {slab: bytearray(FREE.encode() * n) for slab, (_, n) in slabs.items()}
        used, shared, cached = USED.encode()[0], SHARED.encode()[0], CACHED.encode()[0]
        mask = MAX_SLAB_PAGES - 1
        for block, count in counts.items():
            letters[block >> PAGE_BITS][block & mask] = used if count == 1 else shared
        for block in kept:
            holders = counts[block]
            # One of its references is that of who keeps it.
            letters[block >> PAGE_BITS][block & mask] = (
                cached if holders == 1 else used if holders == 2 else shared
            )
        return [SlabMap(slab, slabs[slab][0], letters[slab].decode()) for slab in sorted(slabs)]

    return states


def packed(states: str) -> str:
    """A map's states with runs of the same letter counted."""
    runs = [(letter, len(list(run))) for letter, run in groupby(states)]
    return "".join(letter if n == 1 else f"{letter}{n}" for letter, n in runs)


def unpacked(text: str) -> str:
    """The states that `packed` was given.

    Raises:
        ValueError: it is none of its texts.
    """
    if not re.fullmatch(r"([.usc]\d{0,6})*", text, re.ASCII):
        raise ValueError(f"{text[:40]!r} is no map of blocks: letters of .usc and numbers make one")
    runs = re.findall(r"([.usc])(\d*)", text, re.ASCII)
    return "".join(letter * int(n or 1) for letter, n in runs)
