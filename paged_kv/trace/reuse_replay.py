"""Replays the prompts of a trace with an eviction policy: how much of them would be found cached.

This replays only which full pages prompts begin with, one prompt after the other in the order of
arrival. A prompt looks its pages up, makes room, and caches all of them, or as many of its first
ones as the budget holds. The prefix index is the one that serves, with the id of a page in the
place of a token and a block of one byte in the place of a page. What a running request holds
besides, generated tokens and sliding windows are not counted.

`most_reuse` tells the most that any policy could find, because it knows the future: it evicts the
page that is used again last (Belady 1966, "A study of replacement algorithms for a virtual-storage
computer"). A page is used again no later than those behind it, so these go before it, as in the
index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import takewhile
from typing import Protocol

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes.eviction import (
    LEAST_WORTH,
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
)
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.trace.requests import TracedLoad
from paged_kv.trace.shared_prompts import Runs
from paged_kv.trace.simulated_pool import token_of

POLICIES: dict[str, EvictionPolicy] = {
    "lru": LeastRecentlyUsed(),
    "lfu": LeastFrequentlyUsed(),
    "fifo": FirstInFirstOut(),
    "worth": LEAST_WORTH,
}

# A page in use is used again before all others.
_IN_USE = -1

Pages = Sequence[int]
"""The ids of a prompt's full pages. Equal ids have equal pages before them."""


@dataclass(frozen=True)
class Reuse:
    """What prompts have found, of all pools.

    Attributes:
        capacity: how many pages fit, or states of `state_replay`.
        tokens_asked, tokens_found: of prompts.
        evicted: how many of them were evicted.
    """

    capacity: int
    tokens_asked: int
    tokens_found: int
    evicted: int

    @property
    def share(self) -> float:
        """The share of the prompts' tokens that was found."""
        return self.tokens_found / self.tokens_asked if self.tokens_asked else 0.0


class Cache(Protocol):
    """Caches pages.

    Attributes:
        evicted: pages that were evicted.
    """

    evicted: int

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
        self.evicted = 0
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
        self.evicted += self._index.evict(lambda: len(self._index) <= room)
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
        self.evicted = 0
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
            self.evicted += 1


def pages_of(runs: Runs) -> list[int]:
    """The ids of a prompt's full pages."""
    return [token_of(run.owner, page) for run in runs for page in range(run.first, run.end)]


def replay_reuse(load: TracedLoad, policy: EvictionPolicy, max_bytes: int | None = None) -> Reuse:
    """Replay the prompts of a load. `max_bytes` is the budget of each pool; None means what was
    recorded. O(pages * log pages)."""
    return _replayed(load, max_bytes, lambda capacity, _: IndexedPages(capacity, policy))


def most_reuse(load: TracedLoad, max_bytes: int | None = None) -> Reuse:
    """As `replay_reuse`, with the most that any policy could find."""
    return _replayed(load, max_bytes, ForeseenPages)


def _replayed(
    load: TracedLoad, max_bytes: int | None, cache_of: Callable[[int, Sequence[Pages]], Cache]
) -> Reuse:
    def found_in(capacity: int, prompts: Sequence[Pages]) -> tuple[int, int]:
        cache = cache_of(capacity, prompts)
        return sum(map(cache.serve, prompts)), cache.evicted

    return reuse_in_pools(load, partial(load.pages_that_fit, max_bytes=max_bytes), found_in)


def reuse_in_pools(
    load: TracedLoad,
    capacity_of: Callable[[int], int],
    found_in: Callable[[int, Sequence[Pages]], tuple[int, int]],
) -> Reuse:
    """What the prompts of a load find in all pools.

    Args:
        capacity_of: how much fits in a pool.
        found_in: how many pages the prompts of one pool find where so much fits, and how much is
            evicted.
    """
    found = evicted = capacity = 0
    for pool in load.pools:
        fitting = capacity_of(pool)
        prompts = [pages_of(each.runs) for each in load.requests if each.pool == pool]
        pages, gone = found_in(fitting, prompts)
        found, evicted, capacity = found + pages, evicted + gone, capacity + fitting
    asked = sum(request.prompt for request in load.requests)
    return Reuse(capacity, asked, found * load.page_size, evicted)
