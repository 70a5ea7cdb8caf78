"""Describes the memory of a pool in integers: what sequences take, and how much can be promised."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

# A length that no memory holds: it fits only if all layers have windows.
UNENDING = 1 << 50

# A sequence begins only if it and all running ones can write so many tokens, see `growth`. That is
# the number of steps of the longest prompt of which this is promised: 64K tokens, 2,048 a step.
# In simulations of the short answers of benches/admission.py in 10 blocks, 6.4 sequences run with
# 32 and 3.9 with 256, and none is preempted. With 8, 6.9 run, and 10 are preempted.
LOOKAHEAD = 32


@dataclass(frozen=True)
class GroupSize:
    """The memory of a sequence in a layer group.

    Attributes:
        block_bytes: bytes of a full block; `first_bytes` may say otherwise of the first one.
        blocks_for: returns the number of blocks for a number of tokens.
        is_ring: whether blocks are overwritten, so that sequences cannot share them for long.
        written_bytes: bytes of a block while it is written, if full blocks are recoded.
        written_blocks: the most such blocks of a sequence at a time; 0 if none is recoded.
        first_bytes: bytes of a full block that sequences begin with; 0 if it is as large as others.
        kept_blocks: blocks of a sequence that memory must hold whole; None for all.
        left_bytes: bytes of every other block.
    """

    block_bytes: int
    blocks_for: Callable[[int], int]
    is_ring: bool = False
    written_bytes: int = 0
    written_blocks: int = 0
    first_bytes: int = 0
    kept_blocks: int | None = None
    left_bytes: int = 0

    def bytes_for(self, tokens: int) -> int:
        """The most bytes that a sequence of `tokens` tokens takes in the group."""
        blocks = self.blocks_for(tokens)
        written = min(self.written_blocks, blocks)
        # The first of those becomes a recoded one; others are there while it is recoded.
        return self.full_bytes(blocks - min(1, written)) + self.written_bytes * written

    def full_bytes(self, blocks: int) -> int:
        """Bytes of the first `blocks` blocks of a sequence when they are full."""
        larger = self.first_bytes - self.block_bytes if blocks and self.first_bytes else 0
        left = 0 if self.kept_blocks is None else max(0, blocks - self.kept_blocks)
        return self.block_bytes * (blocks - left) + self.left_bytes * left + larger


@dataclass(frozen=True)
class PoolSize:
    """The memory that a pool can promise.

    Attributes:
        budget: the bytes that it may map.
        slack: bytes of the budget that may stay unused, because memory is mapped in slabs.
        groups: all layer groups of the pool.
        page_size: tokens a block.
        lookahead: tokens that all sequences must be able to write when another one begins.
    """

    budget: int
    slack: int
    groups: tuple[GroupSize, ...]
    page_size: int = 256
    lookahead: int = LOOKAHEAD

    @property
    def promisable(self) -> int:
        """The total number of bytes that can be promised."""
        return max(0, self.budget - self.slack)

    def bytes_for(self, tokens: int) -> int:
        """The most bytes that a sequence of `tokens` tokens takes."""
        return sum(group.bytes_for(tokens) for group in self.groups)

    def shared_bytes(self, tokens: int) -> int:
        """The bytes of these tokens that all their continuations share to their end."""
        shared = [group for group in self.groups if not group.is_ring]
        return sum(group.full_bytes(tokens // self.page_size) for group in shared)

    @property
    def longest(self) -> float:
        """The length of the longest sequence that may run, while no other does; infinite if any
        may."""
        return max(0, self.tokens_in(self.promisable))

    def tokens_in(self, nbytes: int) -> float:
        """The length of the longest sequence that fits in `nbytes`; infinite if any fits."""
        if self.bytes_for(UNENDING) <= nbytes:
            return math.inf
        most = nbytes // min(each.left_bytes or each.block_bytes for each in self.groups) + 1
        lengths = range(0, (most + 1) * self.page_size, self.page_size)
        return lengths[bisect_right(lengths, nbytes, key=self.bytes_for) - 1]
