"""Counts the references to each block, and keeps the totals up to date: all references, shared
blocks and cached blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paged_kv.allocator.errors import BlockStateError

OnMove = Callable[[int, int], None]


@dataclass(eq=False, repr=False)
class RefCounts:
    """The reference count of each block that is not free.

    `count_cached` is called with (block, change) when a block becomes cached (1), or is no longer
    cached (-1). `not_used` makes the error for a block without a reference.
    """

    count_cached: Callable[[int, int], None]
    not_used: Callable[[int], BlockStateError]
    counts: dict[int, int] = field(default_factory=dict, init=False)  # a free block is missing
    # The blocks that the prefix index or `OutOfWindowBlocks` keeps; the value is called when their
    # pages move.
    kept: dict[int, OnMove] = field(default_factory=dict, init=False)
    total: int = field(default=0, init=False)  # references of all blocks
    shared: int = field(default=0, init=False)  # blocks that several tables hold

    def holders(self, block: int) -> int:
        """Tables that hold a block."""
        return self.counts.get(block, 0) - (block in self.kept)

    def is_cached(self, block: int) -> bool:
        """Whether a block is kept for later and no table holds it."""
        return block in self.kept and self.counts[block] == 1

    def begin(self, blocks: list[int]) -> None:
        """Give free blocks their first reference."""
        self.counts.update(dict.fromkeys(blocks, 1))
        self.total += len(blocks)

    def retain(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block.

        Raises:
            BlockStateError: a block has no reference; nothing was changed.
        """
        counts, kept = self.counts, self.kept
        for block in blocks:
            if block not in counts:
                raise self.not_used(block)
        for block in blocks:
            count = counts[block]
            counts[block] = count + 1
            if count <= 2:
                holders = count - (block in kept)
                if holders == 1:
                    self.shared += 1
                elif holders == 0:
                    self.count_cached(block, -1)
        self.total += len(blocks)

    def release(self, blocks: list[int]) -> list[int]:
        """Remove a reference from each block; returns the blocks that have none left.

        Raises:
            BlockStateError: a block is named more often than it has references;
                nothing was changed.
        """
        freed: list[int] = []
        few: list[tuple[int, int]] = []
        counts = self.counts
        for done, block in enumerate(blocks):
            count = counts.pop(block, 0)
            if count == 1:
                freed.append(block)
            elif count > 1:
                counts[block] = count - 1
                if count <= 3:
                    few.append((block, count - 1))
            else:
                counts.update(Counter(counts) + Counter(blocks[:done]))
                raise self.not_used(block)
        self.total -= len(blocks)
        for block, left in few:
            holders = left - (block in self.kept)
            if holders == 1:
                self.shared -= 1
            elif holders == 0:
                self.count_cached(block, 1)
        return freed

    def keep(self, block: int, on_move: OnMove) -> None:
        """Keep a used block for later with a reference of its own; `on_move` is called with (block,
        other block) after its pages moved.

        Raises:
            BlockStateError: the block has no reference; nothing was changed.
        """
        if block not in self.counts:
            raise self.not_used(block)
        self.counts[block] += 1
        self.total += 1
        self.kept[block] = on_move

    def evict(self, block: int) -> list[int]:
        """Remove the reference of `keep`; returns the block if that was the last one."""
        was_cached = self.is_cached(block)
        del self.kept[block]
        self.total -= 1
        if was_cached:
            self.count_cached(block, -1)
            del self.counts[block]
            return [block]
        self.counts[block] -= 1
        return []

    def move(self, source: int, target: int) -> OnMove | None:
        """Move all references to another block; returns the callback of `keep`, if any."""
        is_cached = self.is_cached(source)
        self.counts[target] = self.counts.pop(source)
        on_move = self.kept.pop(source, None)
        if on_move is not None:
            self.kept[target] = on_move
        if is_cached:
            self.count_cached(source, -1)
            self.count_cached(target, 1)
        return on_move

    def check(self, entries: Iterable[int]) -> None:
        """Verify the counts against the entries of all tables."""
        found = Counter(entries)
        found.update(self.kept.keys())
        assert dict(found) == self.counts, "references and table entries differ"
        assert self.total == found.total(), "references are miscounted"
        shared = sum(self.holders(block) > 1 for block in self.counts)
        assert self.shared == shared, "shared blocks are miscounted"
