"""Chooses which cached prefixes to evict first.

The prefix index, cached out-of-window blocks, snapshots of recurrent states and the store on disk
ask one policy. What is pinned or in use stays in any case, and a block goes only after the blocks
that follow it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar

from sortedcontainers import SortedDict


class Use(NamedTuple):
    """When and how often an entry was used, in ticks of one clock. Storing it is its first use.

    Attributes:
        first: its first use.
        last: its latest use.
        times: how many there were.
    """

    first: int
    last: int
    times: int = 1

    def again(self, now: int) -> Use:
        """The same entry, used once more."""
        return Use(self.first, now, self.times + 1)


class EvictionPolicy(Protocol):
    """Ranks cached entries. Pass one as `eviction_policy` to `PagedCacheFactory`."""

    def rank(self, use: Use) -> float:
        """The entry of the lowest rank is evicted first, and of several the one that was used
        least recently. Must depend on nothing but `use`."""
        ...


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


LEAST_RECENTLY_USED = LeastRecentlyUsed()

Entry = TypeVar("Entry", bound=Hashable)


class EvictionOrder(Generic[Entry]):
    """Entries in the order in which a policy evicts them. Changes take O(log n).

    Args:
        policy: ranks them.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._clock = count(1)
        self._ranked: SortedDict[tuple[float, int], Entry] = SortedDict()
        self._uses: dict[Entry, Use] = {}

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, entry: object) -> bool:
        return entry in self._uses

    def __iter__(self) -> Iterator[Entry]:
        """A copy, so that entries may be removed meanwhile."""
        return iter(list(self._ranked.values()))

    def __getitem__(self, index: int) -> Entry:
        """The entry before which `index` others go."""
        entry: Entry = self._ranked.peekitem(index)[1]
        return entry

    def index(self, entry: Entry) -> int:
        """How many others go before it."""
        return int(self._ranked.index(self._key(self._uses[entry])))

    def now(self) -> int:
        """The next tick of the clock."""
        return next(self._clock)

    def put(self, entry: Entry, use: Use) -> None:
        """Add an entry, or change its rank."""
        self.discard(entry)
        self._uses[entry] = use
        self._ranked[self._key(use)] = entry

    def touch(self, entry: Entry) -> None:
        """Use an entry that is there once more, or add it."""
        now, before = self.now(), self._uses.get(entry)
        self.put(entry, Use(now, now) if before is None else before.again(now))

    def discard(self, entry: Entry) -> None:
        """Remove an entry if it is there."""
        use = self._uses.pop(entry, None)
        if use is not None:
            del self._ranked[self._key(use)]

    def _key(self, use: Use) -> tuple[float, int]:
        return self._policy.rank(use), use.last
