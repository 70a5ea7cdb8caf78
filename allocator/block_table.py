"""A sequence's blocks in one group: the token at position p lives in the entry of block
p // page_size, row p % page_size. The entry of block b is b, or what the ring says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_kv.allocator.idle_rows import Rows
from paged_kv.allocator.ring import Ring, bits

if TYPE_CHECKING:
    from paged_kv.allocator.block_allocator import BlockAllocator


class BlockTable:
    """The block ids of one sequence. Made by `BlockAllocator.new_table` and `fork`.

    Only blocks with one reference are written. A block that `fork` shares is replaced by a copy
    before the first write to it, by whoever writes first.

    Attributes:
        blocks: the ids. A tuple, which is replaced when it changes: whoever reads tables, layer
            after layer, may keep it, and sees by its identity that nothing has changed.
        page_format: the format of the blocks that are appended from now on.
        ring: how entries are used again; None if they are not.
        last_reserved: what the allocator's `tokens_reserved` was when this table last reserved.
        tokens: how many tokens there are, those of a step that is about to be written included.
        partly: the rows that it uses of blocks that are not full of them.
        owner: names the sequence, the same in all groups.
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
        self.partly: dict[int, Rows] = {}
        self.owner = ""
        self._reserved_end = 0

    def change(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Hold these blocks, which have a reference for it, and so many tokens in them. Returns the
        blocks held before, whose references are still to be released."""
        before = self.blocks
        self.blocks, self.tokens = blocks, tokens
        self.allocator.idle_rows.note(self)
        return before

    def partly_used(self) -> dict[int, Rows]:
        """The rows in use of each block in which not all are. O(1), or O(entries) of a ring."""
        size = self.allocator.page_size
        if self.ring is None:
            tail = len(self.blocks) * size - self.tokens
            used = bits(0, size - tail)
            return {self.blocks[-1]: Rows(used, used)} if tail else {}
        full = bits(0, size)
        rows = [Rows(*self.ring.rows(at, self.tokens, size)) for at in range(len(self.blocks))]
        return {b: each for b, each in zip(self.blocks, rows, strict=True) if each.live != full}

    def blocks_of(self, start: int, end: int) -> tuple[int, ...]:
        """The blocks that hold the tokens at [start, end), in their order. In a ring the last may
        be the first again."""
        first, last = start // self.allocator.page_size, self._pages(end)
        if self.ring is None:
            return self.blocks[first:last]
        return tuple([self.blocks[self.ring.entry(block)] for block in range(first, last)])

    def is_reserved(self, end: int) -> bool:
        """Whether `reserve` has been up to `end`, and nothing was forked or truncated since."""
        return end <= self._reserved_end

    def forget_reserved(self) -> None:
        """Look at the blocks again before the next write: some may be shared now."""
        self._reserved_end = 0

    def owns(self, start: int, end: int) -> bool:
        """Whether the tokens at [start, end) go to the last block, which nobody else holds, as a
        step of decoding mostly does."""
        size, blocks = self.allocator.page_size, self.blocks
        return (
            self.ring is None
            and len(blocks) * size - size <= start < end <= len(blocks) * size
            and self.allocator.refs.counts.get(blocks[-1]) == 1
        )

    def reserve(self, start: int, end: int) -> dict[int, int]:
        """Own entries for the tokens at [start, end); all or nothing.

        Appends blocks, and replaces those that are shared. Returns the copies (from block, to
        block) that the pages need before the first write.

        Raises:
            PoolExhausted: there are not enough blocks; nothing was changed.
        """
        allocator = self.allocator
        # No table is dropped between the plan and the copies: a block to copy from stays in use.
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
        """Own new blocks of these formats, full of tokens, behind the others; all or none.

        Raises:
            PoolExhausted: there are not enough blocks; nothing was changed.
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
        """Hold other blocks in use in the place of some, which are released."""
        self.forget_reserved()
        mine = [block for block in self.blocks if block in others]
        self.allocator.retain([others[block] for block in mine])
        self.change(tuple([others.get(block, block) for block in self.blocks]), self.tokens)
        self.allocator.release(mine)

    def truncate(self, num_tokens: int) -> None:
        """Release the blocks behind the first `num_tokens` tokens.

        Those of a ring that was used again hold earlier tokens too: call this only for one that
        was not.
        """
        assert num_tokens >= 0, num_tokens
        self.forget_reserved()
        keep = self._entries_for(num_tokens)
        tail = self.change(self.blocks[:keep], num_tokens)[keep:]
        if tail:
            self.allocator.release(tail)
        self.allocator.events.trimmed(self)

    def rewind(self, num_tokens: int) -> None:
        """Note that there are so many tokens; the blocks stay. For a ring that was used again, and
        for blocks that were filled."""
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
        """Blocks of each format to allocate: a copy is of the format of what it copies."""
        allocator = self.allocator
        needs = Counter([allocator.format_of(self.blocks[entry]).name for entry in shared])
        if missing > 0:
            needs[self.page_format] += missing
        return needs


@dataclass(frozen=True)
class Write:
    """Tokens at [start, end) that are about to be written through a table."""

    table: BlockTable
    start: int
    end: int

    def by_page(self) -> list[Write]:
        """The same tokens in one write a page."""
        size = self.table.allocator.page_size
        borders = range(self.start - self.start % size + size, self.end, size)
        starts, ends = (self.start, *borders), (*borders, self.end)
        return [Write(self.table, *each) for each in zip(starts, ends, strict=True)]


def blocks_needed(writes: Iterable[Write]) -> Counter[str]:
    """Blocks of each format that reserving all `writes`, through tables of one allocator, will
    allocate.

    Of the tables that share a block, the last one to write it keeps it.
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
