"""Maps the tokens of a sequence to blocks of one group. The token at position p lives in the entry
of page b = p // page_size, slot p % page_size. That entry is b, or `Ring.entry(b)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from paged_kv.allocator.ring import Ring, UsedSlots, bits
from paged_kv.allocator.slab_allocator import SlabAllocator


class BlockTable:
    """The block ids of one sequence. Made by `BlockAllocator.new_table` and `fork`.

    Copy on write: a block is written only if it has one reference and the right format, see
    `Write.format_of`. Before its first write to any other block, a table replaces it by a copy:
    see `reserve_all`.

    Attributes:
        blocks: the ids. Every change replaces the tuple, so a reader may keep it and compare
            identities to see that nothing has changed.
        page_format: the format of full blocks. A block that is written has the allocator's own.
        first_format: the format of the first block once it is full. It differs from `page_format`
            only if that is not the allocator's own.
        ring: how a sliding window reuses entries; None if entries are not reused.
        last_reserved: the allocator's `tokens_reserved` at this table's last reservation.
        tokens: number of tokens, including those reserved but not yet written.
        owner: the sequence's name, the same in all groups.
        is_scratch: whether no sequence has it: see `BlockAllocator.new_scratch`.
    """

    def __init__(
        self,
        allocator: SlabAllocator[BlockTable],
        blocks: tuple[int, ...],
        page_format: str,
        first_format: str,
        ring: Ring | None,
    ) -> None:
        self.allocator = allocator
        self.blocks = blocks
        self.page_format = page_format
        self.first_format = first_format
        self.ring = ring
        self.last_reserved = allocator.tokens_reserved
        self.tokens = 0
        self.owner = ""
        self.is_scratch = False
        self._reserved_end = 0
        self._recoded_pages = -1

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
        """The formats of full blocks."""
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
        fresh = {
            name: iter(blocks)
            for name, blocks in self.allocator.take_free(Counter(formats)).items()
        }
        blocks = (*self.blocks, *[next(fresh[name]) for name in formats])
        self.change(blocks, len(blocks) * self.allocator.page_size)

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
        """The number of entries that these take."""
        pages = self.pages_of(num_tokens)
        return pages if self.ring is None else min(pages, self.ring.size)
