"""Which pages become smaller when memory gets short.

Attention reads all pages of a sequence at every step, so none is cold by use. What tells pages
apart is age: the older a token is, the less an error in its numbers matters, but for the first
ones, which nearly every query looks at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from paged_kv.allocator.block_allocator import BlockAllocator


@dataclass(frozen=True)
class FullBlock:
    """A block whose pages are full.

    Attributes:
        block: its id.
        page_format: what its pages are now.
        is_first: whether a sequence begins with it.
        age: blocks that came after it, in its own sequence and, since that was last written, in
            others; of several sequences that hold it, what is least.
    """

    block: int
    page_format: str
    is_first: bool
    age: float


@dataclass(frozen=True)
class Requantisation:
    """A block, and the format that its pages are to get."""

    block: int
    page_format: str


class RequantisationPolicy(Protocol):
    """Chooses pages to make smaller. Give one as `page_format` in the place of "auto".

    Attributes:
        watermark: the share of the budget from which on pages are demoted, in (0, 1].
        page_formats: all formats that requantisations name.
    """

    @property
    def watermark(self) -> float: ...

    @property
    def page_formats(self) -> tuple[str, ...]: ...

    def requantisations(self, blocks: list[FullBlock], pressure: float) -> Iterable[Requantisation]:
        """What could be made smaller, in the order in which it is to be; as much of it is as is
        needed, and then the policy is asked again. `pressure` is the share of the budget that
        would be mapped without; above 1 the step fails."""
        ...


@dataclass(frozen=True)
class OldestFirst:
    """Pages become q8, the oldest first; when all are, q4. A sequence's first page and its `recent`
    latest ones are spared until the budget is nearly full.

    Attributes:
        watermark: see `RequantisationPolicy`. What lies above is room for the smaller pages.
        last_resort: the share of the budget from which on no page is spared. Slabs take up to an
            eighth of the budget, and what lies above must hold the smaller pages of one.
        recent: how many of the latest pages of a sequence are spared.
        page_formats: the formats that pages go through.

    Raises:
        ValueError: `recent` or `last_resort` is out of its range. A pool that is given the policy
            says so of the others.
    """

    watermark: float = 0.75
    last_resort: float = 0.875
    recent: int = 4
    page_formats: tuple[str, ...] = ("q8", "q4")

    def __post_init__(self) -> None:
        if isinstance(self.recent, bool) or not isinstance(self.recent, int) or self.recent < 0:
            raise ValueError(f"recent must be a number of pages from 0 on, got {self.recent!r}")
        if not isinstance(self.last_resort, int | float) or not 0 < self.last_resort <= 1:
            raise ValueError(f"last_resort must lie in (0, 1], got {self.last_resort!r}")

    def requantisations(self, blocks: list[FullBlock], pressure: float) -> Iterator[Requantisation]:
        """See `RequantisationPolicy.requantisations`."""

        def is_spared(block: FullBlock) -> bool:
            return block.is_first or block.age < self.recent

        oldest_first = sorted(blocks, key=lambda block: (is_spared(block), -block.age))
        steps = list(zip(("fp16", *self.page_formats), self.page_formats, strict=False))
        for spared, alike in groupby(oldest_first, is_spared):
            if spared and pressure <= self.last_resort:
                return
            part = list(alike)
            for larger, smaller in steps:
                for block in part:
                    if block.page_format == larger:
                        yield Requantisation(block.block, smaller)


def full_blocks(allocator: BlockAllocator) -> list[FullBlock]:
    """The blocks of an allocator whose pages are full: all but the last of each table. O(table
    entries)."""
    allocator.drain()
    tails = {table.blocks[-1] for table in allocator.tables if table.blocks}
    firsts = {table.blocks[0] for table in allocator.tables if table.blocks}
    ages: dict[int, float] = {}
    for table in allocator.tables:
        idle = (allocator.tokens_reserved - table.last_reserved) / allocator.page_size
        for behind, block in enumerate(reversed(table.blocks)):
            ages[block] = min(ages.get(block, math.inf), behind + idle)
    return [
        FullBlock(block, allocator.format_of(block).name, block in firsts, age)
        for block, age in ages.items()
        if block not in tails
    ]
