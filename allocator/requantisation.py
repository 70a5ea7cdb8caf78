"""Chooses which pages to requantise to fewer bits when memory gets short.

Attention reads all pages of a sequence at every step, so recency of use does not rank pages. Age
does: the older a token, the less a rounding error matters. The first tokens are an exception,
because nearly every query attends to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from paged_kv.allocator.block_allocator import BlockAllocator


@dataclass(frozen=True)
class FullBlock:
    """A block whose pages are full.

    Attributes:
        block: its id.
        page_format: its present format.
        is_first: whether a sequence begins with it.
        age: blocks written after it in its own sequence, plus blocks written by others since that
            sequence's last write; the minimum over the sequences that share it.
    """

    block: int
    page_format: str
    is_first: bool
    age: float


@dataclass(frozen=True)
class Requantisation:
    """A block and the new format of its pages."""

    block: int
    page_format: str


class RequantisationPolicy(Protocol):
    """Chooses pages to requantise. Pass one as `page_format` instead of "auto".

    Attributes:
        watermark: the share of the budget above which pages are requantised, in (0, 1].
        page_formats: all formats that requantisations name.
    """

    @property
    def watermark(self) -> float: ...

    @property
    def page_formats(self) -> tuple[str, ...]: ...

    def requantisations(self, blocks: list[FullBlock], pressure: float) -> Iterable[Requantisation]:
        """Requantisations, the first choice first. The pool applies as many as it needs, and then
        asks again. `pressure` is the share of the budget that would be mapped without them; above
        1 the step would fail."""
        ...


@dataclass(frozen=True)
class OldestFirst:
    """Requantises pages to q8, the oldest first; when all are q8, to q4. Spares a sequence's first
    page and its `recent` latest pages until the budget is nearly full.

    Attributes:
        watermark: see `RequantisationPolicy`. The rest of the budget holds the smaller pages.
        last_resort: the share of the budget above which no page is spared. A slab takes up to an
            eighth of the budget, and the rest of the budget must hold its pages made smaller.
        recent: number of latest pages that are spared in each sequence.
        page_formats: the formats that a page goes through, in order.

    Raises:
        ValueError: `recent` or `last_resort` is out of range. The pool checks the other two.
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
    """The blocks with full pages, those included that a step has reserved and will fill: all but
    the last of each table. O(table entries)."""
    allocator.drain()
    last = {table.blocks[-1] for table in allocator.tables if table.blocks}
    firsts = {table.blocks[0] for table in allocator.tables if table.blocks}
    ages: dict[int, float] = {}
    for table in allocator.tables:
        idle = (allocator.tokens_reserved - table.last_reserved) / allocator.page_size
        for behind, block in enumerate(reversed(table.blocks)):
            ages[block] = min(ages.get(block, math.inf), behind + idle)
    return [
        FullBlock(block, allocator.format_of(block).name, block in firsts, age)
        for block, age in ages.items()
        if block not in last
    ]
