"""Counts the slots of used blocks that hold no live token, as tables change.

A table uses all slots of its blocks but two kinds:

    last block       unwritten slots after the last token
    out of window    slots of a ring whose tokens the window has passed, until they are overwritten

A slot of a shared block is idle only if none of its tables uses it. The tables may have different
lengths, so a bit set for each table records the slots that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

from paged_kv.allocator.format_slabs import FormatSlabs
from paged_kv.allocator.ring import bits


class UsedSlots(NamedTuple):
    """A table's slots in one block, as bit sets: bit i is slot i."""

    written: int
    live: int


class Idle(NamedTuple):
    """Numbers of unused slots in one block."""

    last_block: int
    out_of_window: int


NONE = Idle(0, 0)

PartlyUsed = Mapping[int, UsedSlots]
"""The used slots of each partly used block of a table."""


class IdleSlots:
    """Keeps `FormatSlabs.last_block_slots` and `out_of_window_slots` of all formats up to date.

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
        self._views: dict[int, dict[Hashable, UsedSlots]] = {}
        self._counted: dict[int, Idle] = {}
        self._stale: dict[Hashable, Callable[[], None]] = {}

    def note_later(self, table: Hashable, note: Callable[[], None]) -> None:
        """Let `note` be called, which calls `note`, before anybody asks for the counts: a table has
        more tokens in the blocks that it had. Every step does that."""
        self._stale[table] = note

    def refresh(self) -> None:
        """Update the counts of tables for which `note_later` was called."""
        while self._stale:
            self._stale.popitem()[1]()

    def note(self, table: Hashable, before: PartlyUsed, now: PartlyUsed) -> None:
        """Update the counts after a table changed, before the blocks that it gave up are
        released."""
        self._stale.pop(table, None)
        for block in before:
            if block not in now:
                views = self._views[block]
                del views[table]
                if not views:
                    del self._views[block]
                self._count(block)
        for block, slots in now.items():
            if before.get(block) != slots:
                self._views.setdefault(block, {})[table] = slots
                self._count(block)

    def recount(self, blocks: Iterable[int]) -> None:
        """Update the counts after the number of holders of these blocks changed."""
        self.refresh()
        if self._views:
            for block in self._views.keys() & blocks:
                self._count(block)

    def check(
        self, tables: Iterable[tuple[Iterable[int], PartlyUsed]], formats: Iterable[FormatSlabs]
    ) -> None:
        """Verify the counts against the blocks of all tables."""
        self.refresh()
        views: dict[int, list[UsedSlots]] = {}
        full = bits(0, self._page_size)
        for blocks, partly in tables:
            for block in blocks:
                views.setdefault(block, []).append(partly.get(block, UsedSlots(full, full)))
        for slabs in formats:
            idle = [self._idle(each) for b, each in views.items() if self._format_of(b) is slabs]
            assert slabs.last_block_slots == sum(each.last_block for each in idle), (
                "slots of last blocks are miscounted"
            )
            assert slabs.out_of_window_slots == sum(each.out_of_window for each in idle), (
                "out-of-window slots are miscounted"
            )

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
            slabs.last_block_slots += idle.last_block - counted.last_block
            slabs.out_of_window_slots += idle.out_of_window - counted.out_of_window

    def _idle(self, views: Iterable[UsedSlots]) -> Idle:
        written = live = 0
        for slots in views:
            written |= slots.written
            live |= slots.live
        return Idle(self._page_size - written.bit_count(), (written & ~live).bit_count())
