"""The memory of a pool in integers: what sequences take, and when another one may begin.

If a newcomer took the last free block, the next running sequence that needs one would preempt it,
and its prompt would be computed for nothing. So it begins only if it will have generated a token
before the pool is full again. Until then it takes a step for each chunk of its prompt, and each
running sequence writes a token a step. `PoolSize.lookahead` is a bound of these steps. So these
must fit beside what is in use:

- of a running sequence whose prompt is still being computed: the rest of the prompt, and so many
  tokens more;
- of any other running sequence: so many tokens more;
- of the new sequence: its prompt without the pages that it shares, and so many tokens more.

Most of them end in blocks that are there already. No sequence counts for more than its prompt and
`max_tokens`. A window takes at most its ring, so a ring that is complete counts nothing. A sequence
that cannot be preempted counts with all tokens that it may hold, and a share of them may be
reserved for any sequence: see `Growth.with_reserve`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

# A length that no memory holds: it fits only if all layers have windows.
UNENDING = 1 << 50

# A sequence begins only if it and all running ones can write so many tokens. That is the number of
# steps of the longest prompt of which this is promised: 64K tokens, 2,048 a step.
# In simulations of the short answers of benches/admission.py in 10 blocks, 6.4 sequences run with
# 32 and 3.9 with 256, and none is preempted. With 8, 6.9 run, and 10 are preempted.
LOOKAHEAD = 32


class HeldBlocks(NamedTuple):
    """The most blocks of a sequence in a layer group at a time.

    Attributes:
        first: full, and the first of the sequence.
        others: full, and not the first.
        left: full, and not whole in memory.
        written: those of the pages that are written, if full ones are recoded.
    """

    first: int
    others: int
    left: int
    written: int


@dataclass(frozen=True)
class GroupSize:
    """The memory of a sequence in a layer group.

    Attributes:
        block_bytes: bytes of a full block; `first_bytes` may say otherwise of the first one.
        ring: the most blocks, which are overwritten, so that sequences cannot share them for long;
            None if a sequence keeps all.
        written_bytes: bytes of a block while it is written, if full blocks are recoded.
        written_blocks: the most such blocks of a sequence at a time; 0 if none is recoded.
        first_bytes: bytes of a full block that sequences begin with; 0 if it is as large as others.
        kept_blocks: blocks of a sequence that memory must hold whole; None for all.
        left_bytes: bytes of every other block.
        page_size: tokens a block.
    """

    block_bytes: int
    ring: int | None = None
    written_bytes: int = 0
    written_blocks: int = 0
    first_bytes: int = 0
    kept_blocks: int | None = None
    left_bytes: int = 0
    page_size: int = 256

    def blocks_for(self, tokens: int) -> HeldBlocks:
        """The blocks of a sequence of `tokens` tokens."""
        blocks = -(-tokens // self.page_size)
        blocks = blocks if self.ring is None else min(blocks, self.ring)
        written = min(self.written_blocks, blocks)
        # The first of those becomes a recoded one; others are there while it is recoded.
        return self._full(blocks - min(1, written))._replace(written=written)

    def bytes_for(self, tokens: int) -> int:
        """The most bytes that a sequence of `tokens` tokens takes in the group."""
        return self._bytes_of(self.blocks_for(tokens))

    def full_bytes(self, blocks: int) -> int:
        """Bytes of the first `blocks` blocks of a sequence when they are full."""
        return self._bytes_of(self._full(blocks))

    def _full(self, blocks: int) -> HeldBlocks:
        left = 0 if self.kept_blocks is None else max(0, blocks - self.kept_blocks)
        first = min(1, blocks)
        return HeldBlocks(first, blocks - left - first, left, 0)

    def _bytes_of(self, held: HeldBlocks) -> int:
        whole = held.first * (self.first_bytes or self.block_bytes) + held.others * self.block_bytes
        return whole + held.left * self.left_bytes + held.written * self.written_bytes


@dataclass(frozen=True)
class PoolSize:
    """The memory that a pool can promise.

    Attributes:
        budget: the bytes that it may map.
        slack: bytes of the budget that may stay unused, because memory is mapped in slabs.
        groups: all layer groups of the pool.
        lookahead: tokens that all sequences must be able to write when another one begins.
    """

    budget: int
    slack: int
    groups: tuple[GroupSize, ...]
    lookahead: int = LOOKAHEAD

    @property
    def promisable(self) -> int:
        return max(0, self.budget - self.slack)

    def bytes_for(self, tokens: int) -> int:
        """The most bytes that a sequence of `tokens` tokens takes."""
        return sum(group.bytes_for(tokens) for group in self.groups)

    def shared_bytes(self, tokens: int) -> int:
        """The bytes of these tokens that all their continuations share to their end."""
        shared = [group for group in self.groups if group.ring is None]
        return sum(group.full_bytes(tokens // group.page_size) for group in shared)

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
        page_size = self.groups[0].page_size
        lengths = range(0, (most + 1) * page_size, page_size)
        return lengths[bisect_right(lengths, nbytes, key=self.bytes_for) - 1]


@dataclass(frozen=True)
class Growth:
    """The tokens of a sequence.

    Attributes:
        held: tokens whose pages it holds.
        prompt: tokens that it must hold before it generates the next one.
        most: the most tokens that it may hold.
        owns_last_page: whether it can write on in its last page without a copy, as nothing else
            holds that page.
    """

    held: int
    prompt: int
    most: int
    owns_last_page: bool = False

    def with_reserve(self, share: float) -> Growth:
        """The growth of a sequence for which this share of the tokens that it may still generate is
        reserved: with 1, all its tokens must fit, and it is never preempted."""
        return replace(self, prompt=self.prompt + math.ceil(share * (self.most - self.prompt)))

    def bytes_to_come(self, pool: PoolSize) -> int:
        """Bytes that it takes beside those that it holds, until it has generated
        `lookahead` tokens."""
        return pool.bytes_for(self._soon(pool)) - pool.bytes_for(min(self.held, self._soon(pool)))

    def bytes_to_begin(self, pool: PoolSize) -> int:
        """As `bytes_to_come` for a sequence that waits. If it shares its last page, and that is not
        full, it copies it."""
        if self.owns_last_page:
            return self.bytes_to_come(pool)
        return max(0, pool.bytes_for(self._soon(pool)) - pool.shared_bytes(self.held))

    def _soon(self, pool: PoolSize) -> int:
        return min(self.most, max(self.held, self.prompt) + pool.lookahead)


def has_room(new_bytes: int, running: Iterable[Growth], pool: PoolSize, bytes_in_use: int) -> bool:
    """Whether a sequence that takes `new_bytes` may begin beside the running ones. `bytes_in_use`
    are the bytes of all blocks that sequences hold, not of cached ones, which can be evicted."""
    to_come = sum(each.bytes_to_come(pool) for each in running)
    return bytes_in_use + to_come + new_bytes <= pool.promisable
