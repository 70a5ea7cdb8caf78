"""Records what keeps prompts in the prefix index: pins without end, holds that end at a time, and
the sessions that use them.

A pin lasts until `unpin`. Later insertions may change the nodes that match its prompt. So each pin
records its own nodes, and `unpin` releases those.

A hold ends at its time, and earlier where others need its memory. Several prompts may hold one
node: it is pinned once, until the latest time that one of them asked for. All holds may take a
share of the memory, and those of one namespace half of it. Beyond that, holds of the namespace that
has most end at once: those that would end first, and of one prompt the last blocks before the first
ones.

A prompt of a session marks the node that it ends with, and so uses this node and those before it.
When the node is evicted, its marks move to its parent, and when it is replaced, to the node in its
place. So marks show what is left of each prompt, without its tokens.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from paged_kv.allocator.errors import NotPinned, UnknownSession
from paged_kv.allocator.prefixes.prefix_node import Match, Node, Owner
from paged_kv.lru import LRU

# A session takes some hundred bytes, and each of its prompts that is no prefix of another as much.
MOST_SESSIONS = 4096


class _Hold(NamedTuple):
    """The hold of one node. The least one ends first: of one time, that of the last block."""

    until: float
    before: int  # nodes that come before, as a negative number
    owner: Hashable  # its namespace
    share: float  # of the memory, 0 to 1


class Holds:
    """The pins and holds of a prefix index, `PrefixIndex.holds`. `unpin` and `expire` may be called
    from any thread; for all else the caller holds the index's lock."""

    def __init__(self, lock: threading.RLock) -> None:
        self.num_pinned = 0  # nodes with a pin or a hold
        self.next_end = inf  # no hold ends before this time
        self._lock = lock
        self._pins: dict[tuple[Hashable, tuple[int, ...]], list[Match]] = {}
        self._holds: dict[Node, _Hold] = {}

    def pin(self, salt: Hashable, tokens: Sequence[int], found: Match) -> None:
        """Protect what was found of a prompt until `unpin` with the same salt. Pins nest."""
        self._add(found.nodes, 1)
        self._pins.setdefault((salt, tuple(tokens)), []).append(found)

    def unpin(self, salt: Hashable, tokens: Sequence[int]) -> int:
        """Undo the latest pin of exactly these tokens with the same salt, whatever was inserted
        since. Returns the number of tokens that it had pinned.

        Raises:
            NotPinned: there is no such pin; nothing was changed.
        """
        with self._lock:
            key = salt, tuple(tokens)
            if key not in self._pins:
                raise NotPinned(len(tokens), sum(map(len, self._pins.values())))
            pinned = self._pins[key].pop()
            if not self._pins[key]:
                del self._pins[key]
            self._add(pinned.nodes, -1)
            return pinned.num_tokens

    def hold(
        self,
        owner: Hashable,
        path: Sequence[Node],
        until: float,
        share_of: Callable[[Node], float],
        most: float,
    ) -> None:
        """Pin the nodes of a path until a time; holds that end later stay.

        Args:
            owner: their namespace.
            share_of: the share of the memory that a node takes, 0 to 1.
            most: the largest share that all holds may take; those of a namespace get half of it.
        """
        for depth, node in enumerate(path):
            known = self._holds.get(node)
            latest = until if known is None else max(until, known.until)
            if known is None:
                self._add([node], 1)
            self._holds[node] = _Hold(latest, -depth, owner, share_of(node))
            self.next_end = min(self.next_end, latest)
        self._keep_below(most)

    def expire(self, now: float) -> None:
        """End the holds whose time has come. O(1) if there is none."""
        if now < self.next_end:
            return
        with self._lock:
            self._end([node for node, hold in self._holds.items() if hold.until <= now])
            self.next_end = min((hold.until for hold in self._holds.values()), default=inf)

    def ending(self) -> Iterator[None]:
        """End one hold after the other, until the caller has enough."""
        for node in self._in_order():
            self._end([node])
            yield

    def follow(self, shorter: Node, longer: Node) -> None:
        """Let the node that replaces another one have its hold."""
        hold = self._holds.get(shorter)
        if hold is not None:
            self._end([shorter])
            self._add([longer], 1)
            self._holds[longer] = hold

    def _keep_below(self, most: float) -> None:
        """End holds of the owner that has most, until the bounds hold."""
        shares: defaultdict[Hashable, float] = defaultdict(float)
        for hold in self._holds.values():
            shares[hold.owner] += hold.share

        def is_below() -> bool:
            return sum(shares.values()) <= most and max(shares.values(), default=0) <= most / 2

        if is_below():
            return
        lines: defaultdict[Hashable, list[Node]] = defaultdict(list)
        for node in reversed(self._in_order()):
            lines[self._holds[node].owner].append(node)
        while not is_below():
            owner = max(shares, key=shares.__getitem__)
            node = lines[owner].pop()
            shares[owner] -= self._holds[node].share
            self._end([node])

    def _in_order(self) -> list[Node]:
        return sorted(self._holds, key=lambda node: self._holds[node][:2])

    def _end(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            del self._holds[node]
        self._add(nodes, -1)

    def _add(self, nodes: Sequence[Node], change: int) -> None:
        """Add `change` pins to each of these nodes, 1 or -1."""
        for node in nodes:
            before = node.is_pinned
            node.add_pins(change)
            assert node.pins >= 0, "a prefix was unpinned more often than pinned"
            self.num_pinned += node.is_pinned - before


class Owners:
    """The owners of one prefix index, which calls all of this under its lock. Beyond the limit the
    least recently used session is forgotten: its prompts become those of no session."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        # The marked nodes of each session, the least recently used session first.
        self._ends: LRU[Owner, set[Node]] = LRU(most)

    def mark(self, path: Sequence[Node], owner: Owner) -> None:
        """Record that a prompt of an owner ends with the last node of a path from a root's child.
        O(path)."""
        if owner.session is not None:
            ends = self._ends.get(owner, set())
            for gone, nodes in self._ends.put(owner, ends):
                for node in nodes:
                    self.unmark(node, gone)
                    self._put(node, Owner(gone.salt))
            # One mark is enough for all prompts of a session that are prefixes of the longest.
            for node in ends.intersection(path):
                self.unmark(node, owner)
        if path:
            self._put(path[-1], owner)

    def unmark(self, node: Node, owner: Owner) -> None:
        """Forget that a prompt of an owner ends with a node."""
        node.owners.remove(owner)
        if owner in self._ends:
            self._ends[owner].remove(node)

    def move(self, node: Node, target: Node | None) -> None:
        """Let the prompts that end with a node end with another, or with none."""
        for owner in list(node.owners):
            self.unmark(node, owner)
            if target is not None:
                self._put(target, owner)

    def release(self, owner: Owner) -> list[Node]:
        """Forget a session; returns the nodes that its prompts ended with.

        Raises:
            UnknownSession: no prompt of this owner was marked, or it was forgotten since.
        """
        if owner not in self._ends:
            raise UnknownSession(owner.session, len(self._ends))
        nodes = list(self._ends[owner])
        for node in nodes:
            self.unmark(node, owner)
        del self._ends[owner]
        return nodes

    def _put(self, node: Node, owner: Owner) -> None:
        node.owners.add(owner)
        if owner.session is not None:
            self._ends[owner].add(node)
