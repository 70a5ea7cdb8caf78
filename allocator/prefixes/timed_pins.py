"""Pins that end at a time, and earlier where others need their memory.

Several prompts may hold one node: it is pinned once, until the latest time that one of them asked
for. All pins may hold a share of the memory, and those of one namespace half of it. Beyond that,
pins of the namespace that holds most end at once: those that would end first, and of one prompt
the last blocks before the first ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.prefixes.prefix_node import Node


@dataclass(frozen=True)
class _Pin:
    """The pin of one node.

    Attributes:
        owner: its namespace.
        until: the time at which it ends.
        depth: how many nodes come before.
        share: of the memory, 0 to 1.
    """

    owner: Hashable
    until: float
    depth: int
    share: float

    @property
    def order(self) -> tuple[float, int]:
        """The pin that is least in this order ends first."""
        return self.until, -self.depth


class TimedPins:
    """The timed pins of one prefix index. All methods may be called from any thread.

    Args:
        index: whose prefixes are pinned.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._pins: dict[Node, _Pin] = {}
        self._next_end = inf
        index.on_replace = self._follow

    @property
    def next_end(self) -> float:
        """No pin ends before this time; infinite without pins."""
        return self._next_end

    def hold(
        self,
        namespace: Hashable,
        tokens: Sequence[int],
        until: float,
        share_of: Callable[[Node], float],
        most: float,
    ) -> None:
        """Pin the cached prefix of a prompt until a time; pins that end later stay.

        Args:
            share_of: the share of the memory that a node takes, 0 to 1.
            most: the largest share that all pins may take; those of a namespace get half of it.
        """
        with self._index.lock:
            for depth, node in enumerate(self._index.known(namespace, tokens).nodes):
                known = self._pins.get(node)
                latest = until if known is None else max(until, known.until)
                if known is None:
                    self._index.add_pins([node], 1)
                self._pins[node] = _Pin(namespace, latest, depth, share_of(node))
                self._next_end = min(self._next_end, latest)
            self._keep_below(most)

    def expire(self, now: float) -> None:
        """End the pins whose time has come. O(1) if there is none."""
        if now < self._next_end:
            return
        with self._index.lock:
            self._end([node for node, pin in self._pins.items() if pin.until <= now])
            self._next_end = min((pin.until for pin in self._pins.values()), default=inf)

    def evict(self, is_enough: Callable[[], bool]) -> int:
        """As `PrefixIndex.evict`, and if that is not enough, end one pin after the other."""
        evicted = self._index.evict(is_enough)
        if not is_enough():
            for _ in self.ending():
                evicted += self._index.evict(is_enough)
                if is_enough():
                    break
        return evicted

    def ending(self) -> Iterator[None]:
        """End one pin after the other, until the caller has enough. The caller holds the lock."""
        for node in self._in_order():
            self._end([node])
            yield

    def _keep_below(self, most: float) -> None:
        """End pins of the owner that holds most, until the bounds hold."""
        shares: defaultdict[Hashable, float] = defaultdict(float)
        for pin in self._pins.values():
            shares[pin.owner] += pin.share
        if _is_below(shares, most):
            return
        lines: defaultdict[Hashable, list[Node]] = defaultdict(list)
        for node in reversed(self._in_order()):
            lines[self._pins[node].owner].append(node)
        while not _is_below(shares, most):
            owner = max(shares, key=shares.__getitem__)
            node = lines[owner].pop()
            shares[owner] -= self._pins[node].share
            self._end([node])

    def _in_order(self) -> list[Node]:
        return sorted(self._pins, key=lambda node: self._pins[node].order)

    def _end(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            del self._pins[node]
        self._index.add_pins(nodes, -1)

    def _follow(self, shorter: Node, longer: Node) -> None:
        """Let the node that replaces another one have its pin."""
        pin = self._pins.pop(shorter, None)
        if pin is not None:
            self._index.add_pins([shorter], -1)
            self._index.add_pins([longer], 1)
            self._pins[longer] = pin


def _is_below(shares: Mapping[Hashable, float], most: float) -> bool:
    return sum(shares.values()) <= most and max(shares.values(), default=0) <= most / 2
