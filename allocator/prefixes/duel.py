"""Finds out which of two eviction policies finds more of the prompts.

That depends on the load: what is used often returns or not. So both are tried on a sample of the
pages, chosen by their hashes. Each side of the duel keeps, without any memory of pages, what its
policy would have kept of the sample, in as much room as the sample has in the index. Prompts then
ask both for the same pages:

    found by both or by neither    says nothing
    found by one of them           a page for this side
    a lead of the other side       a share of its room: it leads from now on, and the count begins
                                   again

The lead counts from where the present leader was furthest ahead (Page 1954, "Continuous inspection
schemes"): a good past does not help it, and what is lost before each change is bounded. The sample
is small, as in set dueling (Qureshi et al. 2007, "Adaptive insertion policies for high performance
caching"), and chosen as in SHARDS (Waldspurger et al. 2015, "Efficient MRC construction with
SHARDS"): one in 2, 4, 8 ... pages as the index grows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paged_kv.allocator.prefixes.eviction import (
    LEAST_RECENTLY_USED,
    LEAST_WORTH,
    EvictionOrder,
    EvictionPolicy,
)
from paged_kv.allocator.prefixes.uses import Use

# Pages of the sample at most, on each side.
_SAMPLE = 512
# The share of its room by which the other side must lead. With a quarter, new leaders come late;
# with a 16th, a few long prompts change the leader (benches/duels.py).
_LEAD = 1 / 8


@dataclass(frozen=True)
class BetterOfTwo:
    """Evicts by whichever of two policies would have found more of the latest prompts.

    The index of prefixes measures this. All else ranks by the first one: recurrent states, and
    pages that a window has passed.

    Attributes:
        first: leads until the other one has found more.
        second: the other one.
    """

    first: EvictionPolicy = LEAST_WORTH
    second: EvictionPolicy = LEAST_RECENTLY_USED

    def rank(self, use: Use) -> float:
        """The rank of the first one."""
        return self.first.rank(use)


BETTER_OF_TWO = BetterOfTwo()


class _Side:
    """The pages of the sample that one policy would have kept, by their hashes."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._order: EvictionOrder[int] = EvictionOrder(policy)

    def use(self, page: int) -> bool:
        """Let a prompt find a page; returns whether it is there."""
        is_there = page in self._order
        if is_there:
            self._order.touch(page)
        return is_there

    def store(self, page: int) -> None:
        """Keep a page."""
        order = self._order
        known = page in order
        use = order.history.stored(order.use_of(page)) if known else order.history.first(page)
        order.put(page, use)

    def shrink(self, room: int) -> None:
        """Evict pages until at most so many are left."""
        order = self._order
        while len(order) > room:
            page = order[0]
            order.history.forget(page, order.use_of(page), room)
            order.discard(page)

    def discard(self, page: int) -> None:
        """Give up a page that may be there."""
        self._order.discard(page)

    def keep_one_in(self, one_in: int) -> None:
        """Keep only those of a smaller sample."""
        for page in self._order:
            if page % one_in:
                self._order.discard(page)


class Duel:
    """The duel of two policies over the pages of one prefix index. A page takes O(log n).

    Args:
        policies: whose pages are compared.
    """

    def __init__(self, policies: BetterOfTwo) -> None:
        self._leader, self._other = _Side(policies.first), _Side(policies.second)
        self._lead = 0
        self._one_in = 1

    @property
    def policy(self) -> EvictionPolicy:
        """The one that leads."""
        return self._leader.policy

    def use(self, pages: Iterable[int]) -> None:
        """Let a prompt look pages up, by their hashes: of a path the last one first."""
        for page in pages:
            if page % self._one_in == 0:
                is_kept, is_kept_by_other = self._leader.use(page), self._other.use(page)
                self._lead = max(0, self._lead + is_kept_by_other - is_kept)

    def discard(self, page: int) -> None:
        """Note that a page has gone that neither policy has chosen."""
        for side in (self._leader, self._other):
            side.discard(page)

    def store(self, pages: Iterable[int], size: int) -> None:
        """Note that pages were inserted, of a path the last one first; the index has `size` now."""
        while size > _SAMPLE * self._one_in:
            self._one_in *= 2
            for side in (self._leader, self._other):
                side.keep_one_in(self._one_in)
        room = max(1, size // self._one_in)
        for page in pages:
            if page % self._one_in == 0:
                for side in (self._leader, self._other):
                    side.store(page)
        for side in (self._leader, self._other):
            side.shrink(room)
        if self._lead > room * _LEAD:
            self._leader, self._other = self._other, self._leader
            self._lead = 0
