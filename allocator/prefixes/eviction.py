"""Chooses which cached prefixes to evict first.

The prefix index, cached out-of-window blocks, snapshots of recurrent states and the store on disk
ask one policy. What is pinned or in use stays in any case, and a block goes only after the blocks
that follow it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import inf, isnan, log2
from typing import Generic, Protocol, TypeVar

from sortedcontainers import SortedDict

from paged_kv.allocator.prefixes.uses import Use, UseHistory

logger = logging.getLogger("paged_kv")

# What a superseded state is worth, of what it was. It is the state of an agent that waits for its
# sub-agent, say, for a while. Shares from 1/16 to 1/256 find nearly as much (benches/eviction.py).
_SUPERSEDED = 1 / 64


class EvictionPolicy(Protocol):
    """Ranks cached entries. Pass one as `eviction_policy` to `PagedCacheFactory`."""

    def rank(self, use: Use) -> float:
        """The entry of the lowest rank is evicted first, and of several the one that was used
        least recently. It is asked when an entry is stored, used, or becomes the last block of a
        prompt. If it raises an error or returns no number, the entry's rank is its latest use."""
        ...


@dataclass(frozen=True)
class LeastWorth:
    """Evicts what is worth least: the recent uses of an entry, times the tokens that it saves a
    prompt a byte. A state that is superseded is worth a 64th of that.

    Uses count less with time as in LRFU (Lee et al. 2001, "LRFU: a spectrum of policies that
    subsumes the least recently used and least frequently used policies"), whose one parameter is
    measured here: the half-life is twice the mean time until entries are used again. As all worths
    halve in the same time, their order stays, and a rank need not be computed again: it is the tick
    at which the worth is 1.
    """

    def rank(self, use: Use) -> float:
        """The tick at which its worth is 1."""
        worth = use.recent * use.saving * (_SUPERSEDED if use.is_superseded else 1)
        return use.last + max(use.half_life, 1) * log2(worth)


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """Evicts what was not used for longest."""

    def rank(self, use: Use) -> float:
        """Its latest use."""
        return use.last


@dataclass(frozen=True)
class LeastFrequentlyUsed:
    """Evicts what was used least often, and of several the least recently used."""

    def rank(self, use: Use) -> float:
        """How often it was used."""
        return use.times


@dataclass(frozen=True)
class FirstInFirstOut:
    """Evicts what was stored first, however often it was used since."""

    def rank(self, use: Use) -> float:
        """Its first use."""
        return use.first


LEAST_WORTH = LeastWorth()
LEAST_RECENTLY_USED = LeastRecentlyUsed()

Entry = TypeVar("Entry", bound=Hashable)


class Ranking:
    """The ranks that a policy gives. A policy of a user must not break what asks it.

    Args:
        policy: is asked.

    Attributes:
        policy: as given.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._has_warned = False

    def __call__(self, use: Use) -> float:
        """The policy's rank; its latest use if the policy fails."""
        try:
            rank = float(self.policy.rank(use))
            if not isnan(rank):
                return rank
            raise ValueError("it returned NaN")
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the eviction policy %r cannot rank %r (%r): such entries rank by their latest "
                    "use; mend its rank(), which must return a number",
                    self.policy,
                    use,
                    error,
                )
            return float(use.last)


class EvictionOrder(Generic[Entry]):
    """Entries in the order in which a policy evicts them. Changes take O(log n).

    Args:
        policy: ranks them.

    Attributes:
        history: when entries are used.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.history = UseHistory()
        self._rank = Ranking(policy)
        self._ranked: SortedDict[tuple[float, int], Entry] = SortedDict()
        # The key of each entry in `_ranked`, and its use.
        self._known: dict[Entry, tuple[tuple[float, int], Use]] = {}

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, entry: object) -> bool:
        return entry in self._known

    def __iter__(self) -> Iterator[Entry]:
        """A copy, so that entries may be removed meanwhile."""
        return iter(list(self._ranked.values()))

    def __getitem__(self, index: int) -> Entry:
        """The entry before which `index` others go."""
        entry: Entry = self._ranked.peekitem(index)[1]
        return entry

    def index(self, entry: Entry) -> int:
        """How many others go before it."""
        return int(self._ranked.index(self._known[entry][0]))

    def use_of(self, entry: Entry) -> Use:
        """When and how often an entry was used."""
        return self._known[entry][1]

    def put(self, entry: Entry, use: Use) -> None:
        """Add an entry, or rank it again. No two entries have the same latest use. One that saves
        nothing goes before all others, whatever the policy."""
        self.discard(entry)
        key = self._rank(use) if use.saving else -inf, use.last
        self._known[entry] = key, use
        self._ranked[key] = entry

    def rank_by(self, policy: EvictionPolicy) -> None:
        """Rank all entries again, by another policy. O(n log n)."""
        self._rank = Ranking(policy)
        for entry, (_, use) in list(self._known.items()):
            self.put(entry, use)

    def touch(self, entry: Entry) -> None:
        """Use an entry that is there once more, or add it."""
        history = self.history
        self.put(entry, history.again(self.use_of(entry)) if entry in self else history.first())

    def discard(self, entry: Entry) -> None:
        """Remove an entry if it is there."""
        if entry in self:
            key, _ = self._known.pop(entry)
            del self._ranked[key]
