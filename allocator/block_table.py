"""Maps the tokens of a sequence to blocks of one group. The token at position p lives in the entry
of page b = p // page_size, slot p % page_size. That entry is b, or `Ring.entry(b)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_kv.allocator.idle_slots import UsedSlots
from paged_kv.allocator.ring import Ring, bits

if TYPE_CHECKING:
    from paged_kv.allocator.block_allocator import BlockAllocator


class BlockTable:
    """The block ids of one sequence. Made by `BlockAllocator.new_table` and `fork`.

    Copy on write: only blocks with one reference are written. Before its first write to a shared
    block, a table replaces the block by a copy.

    Attributes:
        blocks: the ids. Every change replaces the tuple, so a reader may keep it and compare
            identities to see that nothing has changed.
        page_format: the format of blocks appended from now on.
        ring: how a sliding window reuses entries; None if entries are not reused.
        last_reserved: the allocator's `tokens_reserved` at this table's last reservation.
        tokens: number of tokens, including those reserved but not yet written.
        partly: the used slots of each partly used block.
        owner: the sequence's name, the same in all groups.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        blocks: tuple[int, ...],
        page_format: str,
        ring: Ring | None,
    ) -> None:
        self.allocator = allocator
        self.blocks = blocks
        self.page_format = page_format
        self.ring = ring
        self.last_reserved = allocator.tokens_reserved
        self.tokens = 0
        self.partly: dict[int, UsedSlots] = {}
        self.owner = ""
        self._reserved_end = 0

    def change(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Replace the blocks and the number of tokens. The caller has added a reference to each new
        block, and releases the references of the returned, former blocks."""
        before = self.blocks
        self.blocks, self.tokens = blocks, tokens
        self.allocator.idle_slots.note(self)
        return before

    def partly_used(self) -> dict[int, UsedSlots]:
        """The used slots of each partly used block. O(1), or O(entries) with a ring."""
        size = self.allocator.page_size
        if self.ring is None:
            unwritten = len(self.blocks) * size - self.tokens
            used = bits(0, size - unwritten)
            return {self.blocks[-1]: UsedSlots(used, used)} if unwritten else {}
        full = bits(0, size)
        slots = [
            UsedSlots(*self.ring.slots(at, self.tokens, size)) for at in range(len(self.blocks))
        ]
        return {b: each for b, each in zip(self.blocks, slots, strict=True) if each.live != full}

    def blocks_of(self, start: int, end: int) -> tuple[int, ...]:
        """The blocks that hold the tokens at [start, end), in order. In a ring the last block may
        be the first one again."""
        first, last = start // self.allocator.page_size, self._pages(end)
        if self.ring is None:
            return self.blocks[first:last]
        return tuple([self.blocks[self.ring.entry(block)] for block in range(first, last)])

    def is_reserved(self, end: int) -> bool:
        """Whether `reserve` covered `end`, with no fork or truncation since."""
        return end <= self._reserved_end

    def forget_reserved(self) -> None:
        """Let the next write check for shared blocks again."""
        self._reserved_end = 0

    def owns(self, start: int, end: int) -> bool:
        """Whether the tokens at [start, end) all go to an unshared last block: the usual decode
        step."""
        size, blocks = self.allocator.page_size, self.blocks
        return (
            self.ring is None
            and len(blocks) * size - size <= start < end <= len(blocks) * size
            and self.allocator.refs.counts.get(blocks[-1]) == 1
        )

    def reserve(self, start: int, end: int) -> dict[int, int]:
        """Reserve unshared blocks for the tokens at [start, end); all or nothing.

        Appends blocks, and replaces shared ones. Returns the page copies (from block, to block)
        to make before the first write.

        Raises:
            PoolExhausted: too few blocks are available; nothing was changed.
        """
        allocator = self.allocator
        # Drop tables now, not between the plan and the copies, where sources must stay in use.
        allocator.drain()
        assert self in allocator.tables, "this table was dropped"
        allocator.tokens_reserved += end - start
        self.last_reserved = allocator.tokens_reserved
        shared: list[int] = []
        missing = 0
        if not self.owns(start, end):
            shared = self._shared_entries(start, end)
            missing = self._entries_for(end) - len(self.blocks)
        tokens = max(self.tokens, end)
        if not shared and missing <= 0:
            self._reserved_end = end
            self.change(self.blocks, tokens)
            allocator.events.written(self, start, end, 0, 0)
            return {}
        fresh = {
            name: iter(blocks)
            for name, blocks in allocator.take_free(self._needs(shared, missing)).items()
        }
        copies: dict[int, int] = {}
        blocks = list(self.blocks)
        for entry in shared:
            block = blocks[entry]
            copies[block] = blocks[entry] = next(fresh[allocator.format_of(block).name])
        self.change((*blocks, *fresh.get(self.page_format, ())), tokens)
        self._reserved_end = end
        allocator.release(copies)
        allocator.cow_copies += len(copies)
        allocator.events.written(self, start, end, max(0, missing), len(copies))
        return copies

    def append(self, formats: list[str]) -> None:
        """Append new blocks of these formats, counted as full of tokens; all or none.

        Raises:
            PoolExhausted: too few blocks are available; nothing was changed.
        """
        self.allocator.drain()
        fresh = {
            name: iter(blocks)
            for name, blocks in self.allocator.take_free(Counter(formats)).items()
        }
        begin = len(self.blocks) * self.allocator.page_size
        blocks = (*self.blocks, *[next(fresh[name]) for name in formats])
        self.change(blocks, len(blocks) * self.allocator.page_size)
        self.allocator.events.written(self, begin, self.tokens, len(formats), 0)

    def exchange(self, others: Mapping[int, int]) -> None:
        """Replace blocks (old -> new, which is in use) and release the old ones."""
        self.forget_reserved()
        mine = [block for block in self.blocks if block in others]
        self.allocator.retain([others[block] for block in mine])
        self.change(tuple([others.get(block, block) for block in self.blocks]), self.tokens)
        self.allocator.release(mine)

    def truncate(self, num_tokens: int) -> None:
        """Release the blocks after the first `num_tokens` tokens.

        Do not call this after a ring has wrapped: its blocks hold earlier tokens too.
        """
        assert num_tokens >= 0, num_tokens
        self.forget_reserved()
        keep = self._entries_for(num_tokens)
        dropped = self.change(self.blocks[:keep], num_tokens)[keep:]
        if dropped:
            self.allocator.release(dropped)
        self.allocator.events.trimmed(self)

    def rewind(self, num_tokens: int) -> None:
        """Set the number of tokens and keep the blocks: for a ring that has wrapped, and for
        blocks that were filled."""
        self.forget_reserved()
        self.change(self.blocks, num_tokens)
        self.allocator.events.trimmed(self)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.allocator.page_size)

    def _entries_for(self, num_tokens: int) -> int:
        pages = self._pages(num_tokens)
        return pages if self.ring is None else min(pages, self.ring.size)

    def _shared_entries(self, start: int, end: int) -> list[int]:
        if start >= end:
            return []
        written = range(start // self.allocator.page_size, self._pages(end))
        if self.ring is not None:
            entries = {self.ring.entry(block) for block in written}
        else:
            entries = set(written)
        ref_count = self.allocator.ref_count
        return sorted(
            entry
            for entry in entries
            if entry < len(self.blocks) and ref_count(self.blocks[entry]) > 1
        )

    def _needs(self, shared: list[int], missing: int) -> Counter[str]:
        """Blocks of each format to allocate: a copy has the format of its source."""
        allocator = self.allocator
        needs = Counter([allocator.format_of(self.blocks[entry]).name for entry in shared])
        if missing > 0:
            needs[self.page_format] += missing
        return needs


@dataclass(frozen=True)
class Write:
    """A coming write of the tokens at [start, end) through a table."""

    table: BlockTable
    start: int
    end: int

    @property
    def is_owned(self) -> bool:
        """Whether it needs no other block: see `BlockTable.owns`."""
        return self.table.owns(self.start, self.end)

    def by_page(self) -> list[Write]:
        """The same tokens as one write per page."""
        size = self.table.allocator.page_size
        borders = range(self.start - self.start % size + size, self.end, size)
        starts, ends = (self.start, *borders), (*borders, self.end)
        return [Write(self.table, *each) for each in zip(starts, ends, strict=True)]


def blocks_needed(writes: Iterable[Write]) -> Counter[str]:
    """Blocks of each format that reserving all `writes`, through tables of one allocator, will
    allocate.

    Of the tables that share a block, the last writer keeps it and needs no copy.
    """
    needs: Counter[str] = Counter()
    writers: Counter[int] = Counter()
    for write in writes:
        table = write.table
        table.allocator.drain()
        if table.owns(write.start, write.end):
            continue
        needs[table.page_format] += max(0, table._entries_for(write.end) - len(table.blocks))
        for entry in table._shared_entries(write.start, write.end):
            writers[table.blocks[entry]] += 1
    for block, times in writers.items():
        allocator = table.allocator
        needs[allocator.format_of(block).name] += min(times, allocator.ref_count(block) - 1)
    return +needs
