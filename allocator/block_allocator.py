"""Block tables, which map the tokens of a sequence to blocks of one group, and the allocator that
makes them.

The token at position p lives in the entry of page b = p // page_size, slot p % page_size. That
entry is b, or `Ring.entry(b)`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import or_
from typing import NamedTuple

from paged_kv.allocator.allocator_stats import AllocatorStats, FormatStats
from paged_kv.allocator.ring import Ring, UsedSlots, bits
from paged_kv.allocator.slab_allocator import SlabAllocator
from paged_kv.allocator.slabs import MAX_SLAB_PAGES, PAGE_BITS, block_range, compacting, slab_of


@dataclass(eq=False, repr=False)
class BlockTable:
    """The block ids of one sequence. Made by `BlockAllocator.new_table` and `fork`.

    Copy on write: a block is written only if it has one reference and the right format, see
    `Write.format_of`. Before its first write to any other block, a table replaces it by a copy:
    see `reserve_all`.
    """

    allocator: BlockAllocator
    page_format: str  # of full blocks; a block that is written has the allocator's own
    # Of the first block once it is full: another one only if `page_format` is not the allocator's.
    first_format: str
    ring: Ring | None  # how a sliding window reuses entries; None if they are not reused
    # The ids. Every change replaces the tuple, so a reader may keep it and compare identities to
    # see that nothing has changed.
    blocks: tuple[int, ...] = field(default=(), init=False)
    last_reserved: int = field(init=False)  # `tokens_reserved` of the allocator at the last time
    tokens: int = field(default=0, init=False)  # those reserved but not yet written, too
    owner: str = field(default="", init=False)  # the sequence's name, the same in all groups
    is_scratch: bool = field(default=False, init=False)  # no sequence has it: see `new_scratch`
    _reserved_end: int = field(default=0, init=False)
    _recoded_pages: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.last_reserved = self.allocator.tokens_reserved

    def change(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Replace the blocks and the number of tokens. The caller has added a reference to each new
        block, and releases the references of the returned, former blocks."""
        before = self.blocks
        self.blocks, self.tokens = blocks, tokens
        return before

    def partly_used(self) -> dict[int, UsedSlots]:
        """The used slots of each partly used block. O(1), or O(entries) with a ring."""
        size = self.allocator.page_size
        if self.ring is None:
            unwritten = len(self.blocks) * size - self.tokens
            used = bits(0, size - unwritten)
            return {self.blocks[-1]: UsedSlots(used, used)} if unwritten else {}
        full = bits(0, size)
        slots = [self.ring.slots(at, self.tokens, size) for at in range(len(self.blocks))]
        return {b: each for b, each in zip(self.blocks, slots, strict=True) if each.live != full}

    def blocks_of(self, start: int, end: int) -> tuple[int, ...]:
        """The blocks that hold the tokens at [start, end), in order. In a ring the last block may
        be the first one again."""
        first, last = start // self.allocator.page_size, self.pages_of(end)
        if self.ring is None:
            return self.blocks[first:last]
        return tuple([self.blocks[self.ring.entry(block)] for block in range(first, last)])

    def is_reserved(self, end: int) -> bool:
        """Whether a reservation covered `end`, with no fork or truncation since."""
        return end <= self._reserved_end

    def forget_reserved(self) -> None:
        """Let the next write check for shared blocks, and for full ones, again."""
        self._reserved_end, self._recoded_pages = 0, -1

    def is_recoded(self, tokens: int) -> bool:
        """Whether `unrecoded` is known to find nothing among the first `tokens` tokens. O(1)."""
        return not self.recodes or tokens // self.allocator.page_size == self._recoded_pages

    @property
    def recodes(self) -> bool:
        """Whether full blocks get another format than those that are written."""
        return self.page_format != self.allocator.page_format

    @property
    def full_formats(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.first_format, self.page_format)))

    def full_format(self, page: int) -> str:
        """The format of a page's block once it is full."""
        return self.page_format if page else self.first_format

    def unrecoded(self, tokens: int) -> dict[str, list[int]]:
        """The full blocks of the first `tokens` tokens that still have the allocator's format, by
        the format that they are to get. O(entries)."""
        found: dict[str, list[int]] = {}
        if self.is_recoded(tokens):
            return found
        for page, block in enumerate(self.full_blocks(tokens)):
            if self.allocator.is_writable(block):
                found.setdefault(self.full_format(page), []).append(block)
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

    def commit(
        self, start: int, end: int, blocks: tuple[int, ...], copies: Mapping[int, int]
    ) -> None:
        """Reserve the tokens at [start, end) in `blocks`, which the caller has allocated, and
        release the blocks that were copied (from, to) for that. Cannot fail."""
        allocator = self.allocator
        if blocks is not self.blocks:
            if copies:
                self.forget_reserved()
            self.change(blocks, max(self.tokens, end))
            allocator.cow_copies += len(copies)
            allocator.release(copies)
        elif end <= self._reserved_end:
            return
        elif end > self.tokens:
            self.tokens = end
        allocator.tokens_reserved += end - start
        self.last_reserved = allocator.tokens_reserved
        self._reserved_end = end

    def append(self, formats: list[str]) -> None:
        """Append new blocks of these formats, counted as full of tokens; all or none.

        Raises:
            PoolExhausted: too few blocks are available; nothing was changed.
        """
        self.allocator.drain()
        taken = self.allocator.take_free(Counter(formats))
        blocks = (*self.blocks, *[taken[name].pop(0) for name in formats])
        self.change(blocks, len(blocks) * self.allocator.page_size)

    def exchange(self, others: Mapping[int, int]) -> None:
        """Replace blocks (old -> new, which is in use) and release the old ones."""
        self.forget_reserved()
        mine = [block for block in self.blocks if block in others]
        self.allocator.refs.retain([others[block] for block in mine])
        self.change(tuple([others.get(block, block) for block in self.blocks]), self.tokens)
        self.allocator.release(mine)

    def truncate(self, num_tokens: int) -> None:
        """Release the blocks after the first `num_tokens` tokens.

        Do not call this after a ring has wrapped: its blocks hold earlier tokens too.
        """
        assert num_tokens >= 0, num_tokens
        self.forget_reserved()
        keep = self.entries_for(num_tokens)
        dropped = self.change(self.blocks[:keep], num_tokens)[keep:]
        if dropped:
            self.allocator.release(dropped)

    def rewind(self, num_tokens: int) -> None:
        """Set the number of tokens and keep the blocks: for a ring that has wrapped, and for
        blocks that were filled."""
        self.forget_reserved()
        self.change(self.blocks, num_tokens)

    def pages_of(self, num_tokens: int) -> int:
        """The number of pages that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.allocator.page_size)

    def entries_for(self, num_tokens: int) -> int:
        pages = self.pages_of(num_tokens)
        return pages if self.ring is None else min(pages, self.ring.size)


@dataclass(eq=False, repr=False)
class BlockAllocator(SlabAllocator):
    """The blocks of one group of layers, and the tables that hold them."""

    # Those that were made and not dropped.
    tables: set[BlockTable] = field(default_factory=set, init=False)
    tokens_reserved: int = field(default=0, init=False)  # by all tables, ever
    cow_copies: int = field(default=0, init=False)
    _dropped: deque[BlockTable] = field(default_factory=deque, init=False)

    def new_table(
        self,
        ring: Ring | None = None,
        page_format: str | None = None,
        first_format: str | None = None,
    ) -> BlockTable:
        """Make an empty block table, known to this allocator until it is dropped. Its full blocks
        get `page_format`, and the first of them `first_format`, if that is another."""
        self.drain()
        name = page_format or self.page_format
        table = BlockTable(self, name, first_format or name, ring)
        self.tables.add(table)
        return table

    def new_scratch(self, page_format: str) -> BlockTable:
        """Make a table of one block, for a page that is needed for a moment.

        Raises:
            PoolExhausted: no block is available.
        """
        blocks = self.allocate(1, page_format)
        table = self.new_table(page_format=page_format)
        table.is_scratch = True
        table.change(tuple(blocks), self.page_size)
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        """Make a second table of the same blocks, adding a reference to each. O(blocks)."""
        self.drain()
        self.refs.retain(table.blocks)
        table.forget_reserved()
        fork = self.new_table(table.ring, table.page_format, table.first_format)
        fork.change(table.blocks, table.tokens)
        return fork

    def drop(self, table: BlockTable) -> None:
        self.drain()
        self._forget(table)

    def drop_later(self, table: BlockTable) -> None:
        """Drop a table at the next call. For finalisers, which may interrupt a call."""
        self._dropped.append(table)

    def drain(self) -> None:
        """Drop the tables of collected sequences, so that the reference counts are current."""
        # A finaliser may append at any moment; append and popleft are atomic.
        while self._dropped:
            self._forget(self._dropped.popleft())

    def stats(self) -> AllocatorStats:
        """A snapshot. O(slabs + tables), and O(entries) for rings."""
        self.drain()
        return self.snapshot()

    def snapshot(self) -> AllocatorStats:
        """As `stats`, but keeps the blocks of collected sequences; safe for observer threads."""
        refs, left = self.refs, self.budget.left
        last_block, out_of_window = self._idle_slots()
        formats = []
        for each in self.formats:
            rewrite = compacting(each, left)
            compactable = rewrite.freed if rewrite else 0
            left += compactable * each.block_bytes
            formats.append(
                FormatStats(
                    page_format=each.name,
                    block_bytes=each.block_bytes,
                    page_size=self.page_size,
                    slabs=len(each.slabs),
                    used=each.num_used - each.num_cached,
                    cached=each.num_cached,
                    spare=each.spare,
                    fragmented=len(each.free) - each.spare,
                    last_block_slots=last_block[each.name],
                    out_of_window_slots=out_of_window[each.name],
                    compactable=compactable,
                )
            )
        free = sum(len(each.free) for each in self.formats)
        entries = refs.total - len(refs.kept)
        # An estimate: the dictionary of counts with its ids, the list of free ids, and the block
        # tables. The constants were measured with tracemalloc.
        ids = len(refs.counts) * 32 + free * 40
        metadata = sys.getsizeof(refs.counts) + ids + len(self.tables) * 1000 + entries * 8
        return AllocatorStats(
            formats=tuple(formats),
            blocks_shared=refs.shared,
            table_entries=entries,
            tables=len(self.tables),
            tables_dropped=len(self._dropped),
            cow_copies=self.cow_copies,
            allocation_failures=self.allocation_failures,
            bytes_metadata=metadata,
        )

    def block_map(self) -> Callable[[], list[SlabMap]]:
        """Copy the reference counts, and return a function that makes the map of all slabs from the
        copy. Hold the lock for this call only. Both are O(blocks)."""
        slabs = {slab: (each.name, n) for each in self.formats for slab, n in each.slabs.items()}
        counts, kept = dict(self.refs.counts), list(self.refs.kept)

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

    def _idle_slots(self) -> tuple[Counter[str], Counter[str]]:
        """The slots of used blocks that hold no live token, by format: those after the last token,
        and those out of the window. A slot of a shared block is idle if none of its tables uses
        it."""
        used: dict[int, list[UsedSlots]] = {}
        for table in self.tables:
            for block, slots in table.partly_used().items():
                used.setdefault(block, []).append(slots)
        last_block: Counter[str] = Counter()
        out_of_window: Counter[str] = Counter()
        for block, views in used.items():
            if len(views) < self.refs.holders(block):
                continue  # another table uses all of its slots
            written = reduce(or_, [slots.written for slots in views])
            live = reduce(or_, [slots.live for slots in views])
            name = self.format_of(block).name
            last_block[name] += self.page_size - written.bit_count()
            out_of_window[name] += (written & ~live).bit_count()
        return last_block, out_of_window

    def check(self) -> None:
        """Verify every invariant; an AssertionError names the one that is broken. O(n log n)."""
        self.drain()
        refs, formats = self.refs, self.formats
        free = [block for slabs in formats for block in slabs.free]
        used = refs.counts
        pages = self.slabs.items()
        mapped = {block for slab, number in pages for block in block_range(slab, number)}
        assert len(free) == len(set(free)), "a block is free twice"
        assert not used.keys() & set(free), "a block is free and used"
        assert used.keys() | set(free) == mapped, "a block is lost, or lies outside every slab"
        refs.check(block for table in self.tables for block in table.blocks)
        in_slab = Counter(map(slab_of, used))
        for slabs in formats:
            assert slabs.used == {slab: in_slab[slab] for slab in slabs.slabs}, "a count is wrong"
            of_first = [self.format_of(block_range(slab, 1)[0]) for slab in slabs.slabs]
            assert all(each is slabs for each in of_first)
        cached = Counter(self.format_of(each).name for each in refs.kept if refs.is_cached(each))
        counted = Counter({each.name: each.num_cached for each in formats})
        assert cached == counted, "cached blocks are miscounted"
        bytes_mapped = sum(each.capacity * each.block_bytes for each in formats)
        assert bytes_mapped <= self.budget.mapped <= self.budget.max_bytes

    def _forget(self, table: BlockTable) -> None:
        assert table.allocator is self, "this table is another allocator's"
        blocks = table.change((), 0)
        self.release(blocks)
        self.tables.discard(table)

    def _move(self, moves: Mapping[int, int]) -> None:
        super()._move(moves)
        for table in self.tables:
            if not moves.keys().isdisjoint(table.blocks):
                table.blocks = tuple([moves.get(block, block) for block in table.blocks])


# The states of a block in a `SlabMap`: free, held by one table, shared by several, and cached.
FREE, USED, SHARED, CACHED = ".usc"


class SlabMap(NamedTuple):
    """The blocks of a slab, and the format of all its pages."""

    slab: int
    page_format: str
    states: str  # a letter for each block


def packed(states: str) -> str:
    """Run-length encode a map's states: a run of n equal ones is the letter followed by n, or the
    letter alone if n is 1, as in "u3.c12"."""
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
