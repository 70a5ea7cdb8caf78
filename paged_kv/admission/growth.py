"""Derives how much memory must be free before another sequence begins.

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
from collections.abc import Iterable
from dataclasses import dataclass, replace

from paged_kv.admission.pool_size import PoolSize


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
