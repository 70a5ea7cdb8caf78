"""Counts the uses of cached entries, for the policy that evicts them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import count
from math import exp2
from typing import NamedTuple

# A mean is that of about so many latest numbers.
_AVERAGED = 4096
# Entries that were evicted and are remembered: so many times as many as there are, in some MB.
_GONE_SHARE, _MOST_GONE = 4, 1 << 15


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
        """Note a number."""
        self._count = min(self._count + 1, _AVERAGED)
        self.value += (number - self.value) / self._count


class UseHistory:
    """When entries of one kind are used, and how long it takes until they are used again."""

    def __init__(self) -> None:
        self._clock = count(1)
        self._time_until_used = Mean()
        # Latest use and recent uses of entries that were evicted, the longest ago first.
        self._gone: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

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
        self._gone[key] = use.last, use.recent
        self._gone.move_to_end(key)
        while len(self._gone) > min(_MOST_GONE, _GONE_SHARE * (others + 1)):
            self._gone.popitem(last=False)

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
