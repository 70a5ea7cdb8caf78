"""Derives how much memory must be free before another sequence begins.

A sequence that begins takes its prompt, and each running sequence takes a new block in every group
of layers after at most `page_size` tokens. If the newcomer took the last free block, it would be
preempted a step later, and its prompt computed for nothing. So a sequence begins only if all can
get as far as this without another preemption:

- a running sequence whose prompt is still being computed: the rest of the prompt, and one more
  block of tokens in every group;
- any other running sequence: one more block of tokens in every group;
- the new sequence: its prompt without the pages that it shares, and one more block of tokens.

No sequence counts for more than its prompt and `max_tokens`. A window takes at most its ring, so a
ring that is complete counts nothing. With these blocks free each sequence generates at least one
token before the pool is full again, as long as a prompt takes at most `page_size` steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paged_kv.admission.pool_size import PoolSize


@dataclass(frozen=True)
class Growth:
    """The tokens of a sequence.

    Attributes:
        held: tokens whose pages it holds.
        prompt: tokens that it must hold before it generates the next one.
        most: the most tokens that it may hold.
    """

    held: int
    prompt: int
    most: int

    def bytes_to_come(self, pool: PoolSize) -> int:
        """Bytes that it takes beside those that it holds, until it has generated a block of
        tokens."""
        return pool.bytes_for(self._soon(pool)) - pool.bytes_for(min(self.held, self._soon(pool)))

    def bytes_to_begin(self, pool: PoolSize) -> int:
        """As `bytes_to_come` for a sequence that waits: it shares the pages that it holds, so it
        copies the last one if that is not full."""
        return max(0, pool.bytes_for(self._soon(pool)) - pool.shared_bytes(self.held))

    def _soon(self, pool: PoolSize) -> int:
        return min(self.most, max(self.held, self.prompt) + pool.page_size)


def has_room(new_bytes: int, running: Iterable[Growth], pool: PoolSize, bytes_in_use: int) -> bool:
    """Whether a sequence that takes `new_bytes` may begin beside the running ones. `bytes_in_use`
    are the bytes of all blocks that sequences hold, not of cached ones, which can be evicted."""
    to_come = sum(each.bytes_to_come(pool) for each in running)
    return bytes_in_use + to_come + new_bytes <= pool.promisable
