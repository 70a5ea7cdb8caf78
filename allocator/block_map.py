"""Describes the state of every block as a run-length encoded string for each slab.

    .  free       u  held by one table       s  shared by several       c  cached

A run of n equal states is the letter followed by n, or the letter alone if n is 1: "u3.c12".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.slabs import MAX_SLAB_PAGES, PAGE_BITS

FREE, USED, SHARED, CACHED = ".usc"


@dataclass(frozen=True)
class SlabMap:
    """The blocks of a slab.

    Attributes:
        slab: its number in its group.
        page_format: the format of all its pages.
        states: a letter for each block.
    """

    slab: int
    page_format: str
    states: str


def block_map(allocator: BlockAllocator) -> Callable[[], list[SlabMap]]:
    """Copy the reference counts, and return a function that makes the map from the copy. Hold the
    allocator's lock for this call only. Both are O(blocks)."""
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
            # One of the references is that of `keep`.
            letters[block >> PAGE_BITS][block & mask] = (
                cached if holders == 1 else used if holders == 2 else shared
            )
        return [SlabMap(slab, slabs[slab][0], letters[slab].decode()) for slab in sorted(slabs)]

    return states


def packed(states: str) -> str:
    """Run-length encode a map's states."""
    runs = [(letter, len(list(run))) for letter, run in groupby(states)]
    return "".join(letter if n == 1 else f"{letter}{n}" for letter, n in runs)


def unpacked(text: str) -> str:
    """Decode the output of `packed`.

    Raises:
        ValueError: `text` is not such an output.
    """
    if not re.fullmatch(r"([.usc]\d{0,6})*", text, re.ASCII):
        raise ValueError(f"{text[:40]!r} is no map of blocks: expected letters of .usc and numbers")
    runs = re.findall(r"([.usc])(\d*)", text, re.ASCII)
    return "".join(letter * int(n or 1) for letter, n in runs)
