"""Counts the slots (rows) of used blocks that hold no live token, as tables change.

A table uses all slots of its blocks but two kinds:

    tail    unwritten slots after the last token
    ring    slots of a ring whose tokens the window has passed, until they are overwritten

A slot of a shared block is idle only if none of its tables uses it. The tables may have different
lengths, so a bit set for each table records the slots that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from paged_kv.allocator.ring import bits

if TYPE_CHECKING:
    from paged_kv.allocator.block_table import BlockTable
    from paged_kv.allocator.format_slabs import FormatSlabs


class Rows(NamedTuple):
    """A table's slots in one block, as bit sets: bit i is slot i."""

    written: int
    live: int


class Idle(NamedTuple):
    """Numbers of unused slots in one block."""

    tail: int
    ring: int


NONE = Idle(0, 0)


class IdleRows:
    """Keeps `FormatSlabs.tail_rows` and `ring_rows` of all formats up to date.

    Args:
        page_size: slots of a block.
        holders: returns the number of tables that hold a block.
        format_of: returns the format of a block.
    """

    def __init__(
        self,
        page_size: int,
        holders: Callable[[int], int],
        format_of: Callable[[int], FormatSlabs],
    ) -> None:
        self._page_size = page_size
        self._holders = holders
        self._format_of = format_of
        self._views: dict[int, dict[BlockTable, Rows]] = {}
        self._counted: dict[int, Idle] = {}

    def note(self, table: BlockTable) -> None:
        """Update the counts after a table changed, before the blocks that it gave up are
        released."""
        before, now = table.partly, table.partly_used()
        table.partly = now
        for block in before:
            if block not in now:
                views = self._views[block]
                del views[table]
                if not views:
                    del self._views[block]
                self._count(block)
        for block, rows in now.items():
            if before.get(block) != rows:
                self._views.setdefault(block, {})[table] = rows
                self._count(block)

    def recount(self, blocks: Iterable[int]) -> None:
        """Update the counts after the number of holders of these blocks changed."""
        if self._views:
            for block in self._views.keys() & blocks:
                self._count(block)

    def check(self, tables: Iterable[BlockTable], formats: Iterable[FormatSlabs]) -> None:
        """Verify the counts against all tables."""
        views: dict[int, list[Rows]] = {}
        full = bits(0, self._page_size)
        for table in tables:
            partly = table.partly_used()
            for block in table.blocks:
                views.setdefault(block, []).append(partly.get(block, Rows(full, full)))
        for slabs in formats:
            idle = [self._idle(each) for b, each in views.items() if self._format_of(b) is slabs]
            assert slabs.tail_rows == sum(each.tail for each in idle), "tail rows are miscounted"
            assert slabs.ring_rows == sum(each.ring for each in idle), "ring rows are miscounted"

    def _count(self, block: int) -> None:
        views = self._views.get(block)
        idle = NONE
        if views and len(views) == self._holders(block):
            idle = self._idle(views.values())
        counted = self._counted.pop(block, NONE)
        if idle != NONE:
            self._counted[block] = idle
        if idle != counted:
            slabs = self._format_of(block)
            slabs.tail_rows += idle.tail - counted.tail
            slabs.ring_rows += idle.ring - counted.ring

    def _idle(self, views: Iterable[Rows]) -> Idle:
        written = live = 0
        for rows in views:
            written |= rows.written
            live |= rows.live
        return Idle(self._page_size - written.bit_count(), (written & ~live).bit_count())
