"""Chooses which cached prefixes to evict first.

The prefix index, cached out-of-window blocks, snapshots of recurrent states and the store on disk
ask one policy. It ranks an entry by its uses, which `UseHistory` counts. What is pinned or in use
stays in any case, and a block goes only after the blocks that follow it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from math import exp2, inf, isnan, log2
from typing import Generic, NamedTuple, Protocol, TypeVar

from sortedcontainers import SortedDict

from paged_kv.lru import LRU

logger = logging.getLogger("paged_kv")

# A mean is that of about so many latest numbers.
_AVERAGED = 4096
# Entries that were evicted and are remembered: so many times as many as there are, in some MB.
_GONE_SHARE, _MOST_GONE = 4, 1 << 15
# What a superseded state is worth, of what it was. It is the state of an agent that waits for its
# sub-agent, say, for a while. Shares from 1/16 to 1/256 find nearly as much (benches/eviction.py).
_SUPERSEDED = 1 / 64
# Pages of the sample of a duel at most, on each side.
_SAMPLE = 512
# The share of its room by which the other side must lead. With a quarter, new leaders come late;
# with a 16th, a few long prompts change the leader (benches/eviction.py).
_LEAD = 1 / 8


class Use(NamedTuple):
    """When and how often an entry was used, in ticks of one clock, and what it saves. Storing an
    entry is its first use, each time that a prompt finds it another one.

    Attributes:
        first: its first use.
        last: its latest use, or when it was stored again.
        times: how many uses there were.
        recent: the same, but each use counts half for every `half_life` ticks between it and
            `last`. Uses before an eviction count too, if they are remembered.
        half_life: twice the mean time until entries are used again; 0 until one was. In the store
            on disk always 0.
        position: how many tokens of its prompt end with it; 0 in the store and of out-of-window
            blocks.
        tokens: of a recurrent state, how many a prompt would have to compute if it resumed from
            the state before; of pages 0.
        nbytes: bytes of a recurrent state; of pages 0.
        saving: tokens a byte, relative to the mean of the states; 1 of pages, which all save as
            much, but 0 of those that no prompt can resume from.
        is_superseded: whether it is a recurrent state behind which the same conversation has
            another one, and no prompt has parted between them.
    """

    first: int
    last: int
    times: int = 1
    recent: float = 1.0
    half_life: float = 0.0
    position: int = 0
    tokens: int = 0
    nbytes: int = 0
    saving: float = 1.0
    is_superseded: bool = False


class Mean:
    """The mean of the latest numbers, `value`; 0 without any."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, number: float) -> None:
        self._count = min(self._count + 1, _AVERAGED)
        self.value += (number - self.value) / self._count


class UseHistory:
    """When entries of one kind are used, and how long it takes until they are used again."""

    def __init__(self) -> None:
        self._clock = count(1)
        self._time_until_used = Mean()
        # Latest use and recent uses of entries that were evicted, the longest ago first.
        self._gone: LRU[Hashable, tuple[int, float]] = LRU(_MOST_GONE)

    def now(self) -> int:
        """The next tick of the clock."""
        return next(self._clock)

    def first(self, key: Hashable = None, position: int = 0) -> Use:
        """The first use of a new entry. If one with its key was evicted, `recent` goes on."""
        now, gone = self.now(), self._gone.pop(key, None)
        recent = 1.0 if gone is None else self._with_another(*gone, now)
        return Use(now, now, 1, recent, self._half_life, position)

    def again(self, use: Use) -> Use:
        """An entry that a prompt has found."""
        now = self.now()
        recent = self._with_another(use.last, use.recent, now)
        return Use(use.first, now, use.times + 1, recent, self._half_life, *use[5:])

    def stored(self, use: Use) -> Use:
        """An entry that was stored again, which is no other use of it."""
        now = self.now()
        recent = self._left(use.last, use.recent, now)
        return Use(use.first, now, use.times, recent, self._half_life, *use[5:])

    def forget(self, key: Hashable, use: Use, others: int) -> None:
        """Remember the uses of an entry that is evicted, while not many more entries are evicted
        than there are `others`."""
        self._gone.most = min(_MOST_GONE, _GONE_SHARE * (others + 1))
        self._gone[key] = use.last, use.recent

    @property
    def _half_life(self) -> float:
        return 2 * self._time_until_used.value

    def _with_another(self, last: int, recent: float, now: int) -> float:
        """What the uses of an entry count that is used once more."""
        self._time_until_used.add(now - last)
        return 1 + self._left(last, recent, now)

    def _left(self, last: int, recent: float, now: int) -> float:
        """What the uses of an entry count now."""
        return recent * exp2(-(now - last) / max(self._half_life, 1.0))


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
        worth = use.recent * use.saving * (_SUPERSEDED if use.is_superseded else 1)
        return use.last + max(use.half_life, 1) * log2(worth)


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """Evicts what was not used for longest."""

    def rank(self, use: Use) -> float:
        return use.last


@dataclass(frozen=True)
class LeastFrequentlyUsed:
    """Evicts what was used least often, and of several the least recently used."""

    def rank(self, use: Use) -> float:
        return use.times


@dataclass(frozen=True)
class FirstInFirstOut:
    """Evicts what was stored first, however often it was used since."""

    def rank(self, use: Use) -> float:
        return use.first


LEAST_WORTH = LeastWorth()
LEAST_RECENTLY_USED = LeastRecentlyUsed()

Entry = TypeVar("Entry", bound=Hashable)


class EvictionOrder(Generic[Entry]):
    """Entries in the order in which a policy evicts them. Changes take O(log n).

    A policy of a user must not break what asks it.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.history = UseHistory()
        self._has_warned = False
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
        return int(self._ranked.index(self._known[entry][0]))

    def use_of(self, entry: Entry) -> Use:
        return self._known[entry][1]

    def goes_first(self, uses: Iterable[Use]) -> list[bool]:
        """Of each use, whether its entry would go before one that is stored now."""
        new = self._rank(self.history.first())
        return [self._rank(use) < new for use in uses]

    def put(self, entry: Entry, use: Use) -> None:
        """Add an entry, or rank it again. No two entries have the same latest use. One that saves
        nothing goes before all others, whatever the policy."""
        self.discard(entry)
        key = self._rank(use) if use.saving else -inf, use.last
        self._known[entry] = key, use
        self._ranked[key] = entry

    def rank_by(self, policy: EvictionPolicy) -> None:
        """Rank all entries again, by another policy. O(n log n)."""
        self.policy, self._has_warned = policy, False
        for entry, (_, use) in list(self._known.items()):
            self.put(entry, use)

    def touch(self, entry: Entry) -> None:
        """Use an entry that is there once more, or add it."""
        history = self.history
        self.put(entry, history.again(self.use_of(entry)) if entry in self else history.first())

    def discard(self, entry: Entry) -> None:
        if entry in self:
            key, _ = self._known.pop(entry)
            del self._ranked[key]

    def _rank(self, use: Use) -> float:
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
        return self.first.rank(use)


BETTER_OF_TWO = BetterOfTwo()


class Duel:
    """Finds out which of two eviction policies finds more of the prompts. A page takes O(log n).

    That depends on the load: what is used often returns or not. So both are tried on a sample of
    the pages of one index, chosen by their hashes. Each side keeps, without any memory of pages,
    what its policy would have kept of the sample, in as much room as the sample has in the index.
    Prompts then ask both for the same pages:

        found by both or by neither    says nothing
        found by one of them           a page for this side
        a lead of the other side       a share of its room: it leads from now on, and the count
                                       begins again

    The lead counts from where the present leader was furthest ahead (Page 1954, "Continuous
    inspection schemes"): a good past does not help it, and what is lost before each change is
    bounded. The sample is small, as in set dueling (Qureshi et al. 2007, "Adaptive insertion
    policies for high performance caching"), and chosen as in SHARDS (Waldspurger et al. 2015,
    "Efficient MRC construction with SHARDS"): one in 2, 4, 8 ... pages as the index grows.

    Each side has the hashes of the pages that one policy would have kept.
    """

    def __init__(self, policies: BetterOfTwo) -> None:
        self._leader: EvictionOrder[int] = EvictionOrder(policies.first)
        self._other: EvictionOrder[int] = EvictionOrder(policies.second)
        self._lead = 0
        self._one_in = 1

    @property
    def policy(self) -> EvictionPolicy:
        return self._leader.policy

    def use(self, pages: Iterable[int]) -> None:
        """Let a prompt look pages up, by their hashes: of a path the last one first."""
        for page in pages:
            if page % self._one_in == 0:
                is_kept, is_kept_by_other = page in self._leader, page in self._other
                self._lead = max(0, self._lead + is_kept_by_other - is_kept)
                for side in (self._leader, self._other):
                    if page in side:
                        side.touch(page)

    def discard(self, page: int) -> None:
        """Record that a page has gone that neither policy has chosen."""
        self._leader.discard(page)
        self._other.discard(page)

    def store(self, pages: Iterable[int], size: int) -> None:
        """Record inserted pages, of a path the last one first; the index has `size` now."""
        while size > _SAMPLE * self._one_in:
            self._one_in *= 2
            for side in (self._leader, self._other):
                for page in side:
                    if page % self._one_in:
                        side.discard(page)
        room = max(1, size // self._one_in)
        sample = [page for page in pages if page % self._one_in == 0]
        _store(self._leader, sample, room)
        _store(self._other, sample, room)
        if self._lead > room * _LEAD:
            self._leader, self._other = self._other, self._leader
            self._lead = 0


def _store(side: EvictionOrder[int], pages: Iterable[int], room: int) -> None:
    """Keep pages, and evict until at most `room` are left."""
    history = side.history
    for page in pages:
        is_known = page in side
        side.put(page, history.stored(side.use_of(page)) if is_known else history.first(page))
    while len(side) > room:
        page = side[0]
        history.forget(page, side.use_of(page), room)
        side.discard(page)
