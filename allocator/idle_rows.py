"""The rows of used blocks that hold no live token, counted as tables change.

A table uses all rows of its blocks but two kinds:

    tail    rows behind the last token, which were not written yet
    ring    rows of a ring whose tokens the window has left, until they are written over

A block that several tables hold is idle only in rows that none of them uses. The tables' views of a
block differ in how far they go, so what is idle is the least that any of them sees, and nothing if
one of them uses the whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paged_kv.allocator.block_table import BlockTable
    from paged_kv.allocator.format_slabs import FormatSlabs


class Idle(NamedTuple):
    """Rows of one block that are not used."""

    tail: int
    ring: int


NONE = Idle(0, 0)


class IdleRows:
    """Keeps `FormatSlabs.tail_rows` and `ring_rows` of all formats.

    Args:
        holders: how many tables hold a block.
        format_of: the format of a block.
    """

    def __init__(
        self, holders: Callable[[int], int], format_of: Callable[[int], FormatSlabs]
    ) -> None:
        self._holders = holders
        self._format_of = format_of
        self._views: dict[int, dict[BlockTable, Idle]] = {}
        self._counted: dict[int, Idle] = {}

    def note(self, table: BlockTable) -> None:
        """A table's blocks or tokens have changed. Those that it let go are still in use."""
        before, now = table.idle, table.idle_rows()
        table.idle = now
        for block in before:
            if block not in now:
                views = self._views[block]
                del views[table]
                if not views:
                    del self._views[block]
                self._count(block)
        for block, idle in now.items():
            if before.get(block) != idle:
                self._views.setdefault(block, {})[table] = idle
                self._count(block)

    def recount(self, blocks: Iterable[int]) -> None:
        """The number of holders of these blocks has changed."""
        if self._views:
            for block in self._views.keys() & blocks:
                self._count(block)

    def check(self, tables: Iterable[BlockTable], formats: Iterable[FormatSlabs]) -> None:
        """Verify the counts against all tables."""
        views: dict[int, list[Idle]] = {}
        for table in tables:
            idle = table.idle_rows()
            for block in table.blocks:
                views.setdefault(block, []).append(idle.get(block, NONE))
        for slabs in formats:
            least = [min(each, key=sum) for b, each in views.items() if self._format_of(b) is slabs]
            assert slabs.tail_rows == sum(idle.tail for idle in least), "tail rows are miscounted"
            assert slabs.ring_rows == sum(idle.ring for idle in least), "ring rows are miscounted"

    def _count(self, block: int) -> None:
        views = self._views.get(block)
        least = NONE
        if views and len(views) == self._holders(block):
            least = min(views.values(), key=sum)
        counted = self._counted.pop(block, NONE)
        if least != NONE:
            self._counted[block] = least
        if least != counted:
            slabs = self._format_of(block)
            slabs.tail_rows += least.tail - counted.tail
            slabs.ring_rows += least.ring - counted.ring
