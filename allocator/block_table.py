"""Maps the tokens of a sequence to blocks of one group. The token at position p lives in the entry
of page b = p // page_size, slot p % page_size. That entry is b, or `Ring.entry(b)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from paged_kv.allocator.idle_slots import UsedSlots
from paged_kv.allocator.ring import Ring, bits
from paged_kv.allocator.slab_allocator import SlabAllocator

CopyPages = Callable[[Mapping[int, int]], None]
"""Called with page copies (from block, to block), to make them."""


class BlockTable:
    """The block ids of one sequence. Made by `BlockAllocator.new_table` and `fork`.

    Copy on write: a block is written only if it has one reference and the right format, see
    `Write.format_of`. Before its first write to any other block, a table replaces it by a copy.

    Attributes:
        blocks: the ids. Every change replaces the tuple, so a reader may keep it and compare
            identities to see that nothing has changed.
        page_format: the format of full blocks. A block that is written has the allocator's own.
        ring: how a sliding window reuses entries; None if entries are not reused.
        last_reserved: the allocator's `tokens_reserved` at this table's last reservation.
        tokens: number of tokens, including those reserved but not yet written.
        partly: the used slots of each partly used block.
        owner: the sequence's name, the same in all groups.
        is_scratch: whether no sequence has it: see `BlockAllocator.new_scratch`.
    """

    def __init__(
        self,
        allocator: SlabAllocator[BlockTable],
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
        self.is_scratch = False
        self._reserved_end = 0
        self._recoded_pages = -1

    def change(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Replace the blocks and the number of tokens. The caller has added a reference to each new
        block, and releases the references of the returned, former blocks."""
        before = self.blocks
        self.blocks, self.tokens = blocks, tokens
        self.note_slots()
        return before

    def note_slots(self) -> None:
        """Let the allocator know the slots that the table uses now, before the blocks that it gave
        up are released."""
        before, self.partly = self.partly, self.partly_used()
        self.allocator.idle_slots.note(self, before, self.partly)

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
        """Let the next write check for shared blocks, and for full ones, again."""
        self._reserved_end, self._recoded_pages = 0, -1

    def is_recoded(self, tokens: int) -> bool:
        """Whether `unrecoded` is known to find nothing among the first `tokens` tokens. O(1)."""
        return (
            self.page_format == self.allocator.page_format
            or tokens // self.allocator.page_size == self._recoded_pages
        )

    def unrecoded(self, tokens: int) -> list[int]:
        """The full blocks of the first `tokens` tokens that still have the allocator's format, not
        `page_format`. O(entries)."""
        if self.is_recoded(tokens):
            return []
        found = [block for block in self.full_blocks(tokens) if self.allocator.is_writable(block)]
        if not found:
            self._recoded_pages = tokens // self.allocator.page_size
        return found

    def full_blocks(self, tokens: int) -> tuple[int, ...]:
        """The blocks whose pages the first `tokens` tokens fill; not for rings."""
        return self.blocks[: tokens // self.allocator.page_size]

    def owns(self, start: int, end: int) -> bool:
        """Whether the tokens at [start, end) all go to a last block that can be written as it is:
        the usual decode step."""
        size, blocks = self.allocator.page_size, self.blocks
        return (
            self.ring is None
            and len(blocks) * size - size <= start < end <= len(blocks) * size
            and self.allocator.refs.counts.get(blocks[-1]) == 1
            and self.allocator.is_writable(blocks[-1])
        )

    def grow(self, start: int, end: int) -> None:
        """Reserve the tokens at [start, end), which needs no other block."""
        if end <= self._reserved_end:
            return
        allocator = self.allocator
        allocator.tokens_reserved += end - start
        self.last_reserved = allocator.tokens_reserved
        self._reserved_end = end
        if end > self.tokens:
            self.tokens = end
            allocator.idle_slots.note_later(self, self.note_slots)
        allocator.events.written(self, start, end, 0, 0)

    def reserve(
        self, start: int, end: int, copy_pages: CopyPages = lambda copies: None
    ) -> dict[int, int]:
        """Reserve blocks for the tokens at [start, end); all or nothing.

        Appends blocks, and replaces those that are shared or have another format than the write
        needs by copies. `copy_pages` copies their pages before the table changes, so that the table
        never refers to a page that was not copied. Returns the copies (from block, to block).

        Raises:
            PoolExhausted: too few blocks are available; nothing was changed.
            Exception: what `copy_pages` raises; nothing was changed.
        """
        allocator = self.allocator
        # Drop tables now, not between the plan and the copies, where sources must stay in use.
        allocator.drain()
        assert self in allocator.tables, "this table was dropped"
        replaced: dict[int, str] = {}
        missing: list[str] = []
        if not self.owns(start, end):
            write = Write(self, start, end)
            replaced, missing = write.replaced_entries(), write.missing_formats()
        if not replaced and not missing:
            self.grow(start, end)
            return {}
        taken = allocator.take_free(Counter([*replaced.values(), *missing]))
        fresh = {name: iter(blocks) for name, blocks in taken.items()}
        copies: dict[int, int] = {}
        blocks = list(self.blocks)
        for entry, name in replaced.items():
            copies[blocks[entry]] = blocks[entry] = next(fresh[name])
        blocks += [next(fresh[name]) for name in missing]
        try:
            copy_pages(copies)
        except BaseException:
            allocator.release([block for each in taken.values() for block in each])
            raise
        allocator.tokens_reserved += end - start
        self.last_reserved = allocator.tokens_reserved
        if replaced:
            self.forget_reserved()
        self.change(tuple(blocks), max(self.tokens, end))
        self._reserved_end = end
        allocator.cow_copies += len(copies)
        allocator.release(copies)
        allocator.events.written(self, start, end, len(missing), len(copies))
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

    @property
    def left_pages(self) -> range:
        """The pages that the write fills and leaves."""
        size = self.table.allocator.page_size
        return range(self.start // size, (self.end - 1) // size)

    @property
    def begins_within_page(self) -> bool:
        """Whether its first page holds earlier tokens."""
        return self.start % self.table.allocator.page_size > 0

    @property
    def recoded_pages(self) -> range:
        """Those of `left_pages` that are to be recoded within the write: its later tokens read them
        in the table's `page_format`."""
        recodes = self.table.page_format != self.table.allocator.page_format
        return self.left_pages if recodes else range(0)

    @property
    def needs_scratch(self) -> bool:
        """Whether the first of `recoded_pages` holds earlier tokens. Its block stays as it is until
        the next write, so that a trim finds these tokens as they were written. A block beside the
        table holds the recoded page meanwhile."""
        return bool(self.recoded_pages) and self.begins_within_page

    def format_of(self, page: int) -> str:
        """The format that the write needs of a page's block. A page that the write fills from its
        first slot on and leaves is written in the last page's block and recoded into its own."""
        whole = self.recoded_pages[1:] if self.needs_scratch else self.recoded_pages
        return self.table.page_format if page in whole else self.table.allocator.page_format

    def missing_formats(self) -> list[str]:
        """The formats of the blocks to append."""
        table = self.table
        return [
            self.format_of(page) for page in range(len(table.blocks), table._entries_for(self.end))
        ]

    def replaced_entries(self) -> dict[int, str]:
        """The entries whose blocks the write must replace by copies, with the copies' formats."""
        if self.start >= self.end:
            return {}
        table, allocator = self.table, self.table.allocator
        pages = range(self.start // allocator.page_size, table._pages(self.end))
        entry_of = table.ring.entry if table.ring else int
        found: dict[int, str] = {}
        for page in pages:
            entry, name = entry_of(page), self.format_of(page)
            block = table.blocks[entry] if entry < len(table.blocks) else None
            if block is not None and (
                allocator.ref_count(block) > 1 or allocator.format_of(block).name != name
            ):
                found[entry] = name
        return dict(sorted(found.items()))

    @property
    def is_reserved(self) -> bool:
        """Whether its blocks are reserved, see `BlockTable.is_reserved`, and the last page can be
        written as it is. If layers take different steps, an earlier step may have reserved that
        page as one to leave."""
        table = self.table
        return table.is_reserved(self.end) and all(
            table.allocator.is_writable(block) for block in table.blocks_of(self.end - 1, self.end)
        )

    def by_page(self) -> list[Write]:
        """The same tokens as one write per page."""
        size = self.table.allocator.page_size
        borders = range(self.start - self.start % size + size, self.end, size)
        starts, ends = (self.start, *borders), (*borders, self.end)
        return [Write(self.table, *each) for each in zip(starts, ends, strict=True)]


def blocks_needed(writes: Iterable[Write]) -> Counter[str]:
    """Blocks of each format that reserving all `writes`, through tables of one allocator, will
    allocate.

    Of the tables that share a block, the last writer keeps it and needs no copy, unless it needs
    another format.
    """
    needs: Counter[str] = Counter()
    writers: Counter[tuple[int, str]] = Counter()
    for write in writes:
        table, allocator = write.table, write.table.allocator
        allocator.drain()
        if not write.is_owned:
            needs.update(write.missing_formats())
            writers.update(
                (table.blocks[entry], name) for entry, name in write.replaced_entries().items()
            )
    for (block, name), times in writers.items():
        spared = allocator.format_of(block).name == name
        needs[name] += min(times, allocator.ref_count(block) - spared)
    return +needs
