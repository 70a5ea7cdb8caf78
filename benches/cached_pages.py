"""Finds how much of their prompts an eviction policy keeps cached, for `benches.eviction`.

One prompt comes after the other. It looks its pages up, makes room, and caches all of them, or as
many of its first ones as fit. The prefix index is the one that serves, with the id of a page in the
place of a token and a block of one byte in the place of a page. What a running request holds
besides, generated tokens and sliding windows are not counted.

`ForeseenPages` tells the most that any policy could find, because it knows the future: it evicts
the page that is used again last (Belady 1966, "A study of replacement algorithms for a
virtual-storage computer"). A page is used again no later than those behind it, so these go before
it, as in the index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import takewhile
from typing import Protocol

from benches.page_loads import Pages
from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes.eviction import EvictionPolicy
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex

# A page in use is used again before all others.
_IN_USE = -1


class Cache(Protocol):
    """Caches pages."""

    def serve(self, prompt: Pages) -> int:
        """Cache the pages of the next prompt; returns how many first ones were there."""
        ...


class IndexedPages:
    """Caches pages in a prefix index. A page takes O(log n) for n pages.

    Args:
        capacity: how many pages fit.
        policy: chooses the pages to evict.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self._capacity = capacity
        self._index = PrefixIndex(page_size=1, policy=policy)
        # The index counts pages, so slabs may be mapped in part.
        self._allocator = BlockAllocator(ByteBudget(4 * capacity + 64), block_bytes=1)

    def serve(self, prompt: Pages) -> int:
        kept = prompt[: self._capacity]
        # `match` leaves out a prompt's last token, and all of these count.
        found = self._index.match("", [*kept, -1])
        blocks = [node.blocks[self._allocator] for node in found.nodes]
        self._allocator.retain(blocks)
        room = self._capacity - (len(kept) - len(blocks))
        self._index.evict(lambda: len(self._index) <= room)
        blocks += self._allocator.allocate(len(kept) - len(blocks))
        self._index.insert("", kept, [{self._allocator: block} for block in blocks])
        self._allocator.release(blocks)
        return found.num_tokens


class ForeseenPages:
    """Caches the pages that are used again soonest. A page takes O(log n) for n uses of pages.

    Args:
        capacity: how many pages fit.
        prompts: all prompts that will be served, in their order.
    """

    def __init__(self, capacity: int, prompts: Sequence[Pages]) -> None:
        self._capacity = capacity
        self._never = len(prompts)
        # The prompts that have a page, the next one last.
        self._uses: defaultdict[int, list[int]] = defaultdict(list)
        for number in reversed(range(len(prompts))):
            for page in prompts[number]:
                self._uses[page].append(number)
        # The next use of each cached page, and the same with its depth as a heap, whose entries
        # hold while they agree with it.
        self._cached: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []

    def serve(self, prompt: Pages) -> int:
        found = sum(1 for _ in takewhile(self._cached.__contains__, prompt))
        for page in prompt:
            self._uses[page].pop()
        kept = prompt[: self._capacity]
        self._cached.update(dict.fromkeys(kept, _IN_USE))
        while len(self._cached) > self._capacity:
            self._evict_one()
        for depth, page in enumerate(kept):
            self._cached[page] = next_use = (self._uses[page] or [self._never])[-1]
            heappush(self._heap, (-next_use, -depth, page))
        return found

    def _evict_one(self) -> None:
        next_use, _, page = heappop(self._heap)
        if self._cached.get(page) == -next_use:
            del self._cached[page]
