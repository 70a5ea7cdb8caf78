"""Caches states of recurrent layers, as they were after some tokens of a prompt.

They are not paged: each is a copy of its own, and as large as many pages. So they have a budget of
their own, beside that of the pages, and the order in which they are evicted knows what each is for:

    the last of a conversation    its next turn resumes from it
    at a junction                 prompts have parted behind it, so the next one may too
    on the way                    the conversation has a later state, and nobody parted between them

Those on the way are superseded. A conversation goes on with the latest state of a prompt: that
behind an answer does not supersede it, because many templates leave parts of answers out of the
next prompt. What the states of a path are for is found when it is inserted, and again before one of
them is evicted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paged_kv.allocator.prefixes.eviction import LEAST_WORTH, EvictionOrder, EvictionPolicy, Mean
from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.allocator.prefixes.prefix_node import Node
from paged_kv.pool.page_pool import Sized


@dataclass(eq=False)
class Snapshot:
    """The states of the layers that are not paged.

    Attributes:
        states: None once they were evicted.
        is_answer: whether they end behind tokens that were generated.
        pins: pinned prefixes that hold it.
        place: a node that holds it, and how many of that node's tokens are before it.
    """

    states: Any
    nbytes: int
    is_answer: bool = False
    pins: int = 0
    place: tuple[weakref.ref[Node], int] | None = None


class Snapshots:
    """All snapshots of a prefix cache, which take at most `max_bytes`: `policy` says which of them
    to evict first."""

    def __init__(self, max_bytes: int, policy: EvictionPolicy = LEAST_WORTH) -> None:
        self.max_bytes = max_bytes
        self._order: EvictionOrder[weakref.ref[Snapshot]] = EvictionOrder(policy)
        self._remembered: weakref.WeakSet[Sized] = weakref.WeakSet()
        self._savings = Mean()  # tokens a byte

    @property
    def nbytes(self) -> int:
        """Bytes of all, and of what sequences remember. O(snapshots)."""
        return sum(each.nbytes for each in (*self._live(), *self._remembered))

    def remember(self, states: Sized) -> bool:
        """See `States`. Snapshots are evicted for them."""
        if not self._has_room(states.nbytes):
            return False
        self.shrink(self.max_bytes - states.nbytes)
        self._remembered.add(states)
        return True

    def forget(self, states: Sized) -> None:
        """Count no longer what `remember` counts."""
        self._remembered.discard(states)

    def keep(
        self, path: Sequence[Node], end: int, states: Any, nbytes: int, *, is_answer: bool
    ) -> bool:
        """Keep the states after the first `end` tokens of a path's last node, unless they are kept
        already; the path begins at a root's child. Others are evicted for them. False if there is
        no room."""
        known = dict(live_snapshots(path[-1])).get(end)
        if known is not None:
            known.is_answer &= is_answer
            self._rank_path(path)
            return True
        if not self._has_room(nbytes):
            return False
        snapshot = Snapshot(states, nbytes, is_answer)
        for node in (path[-1], *(sibling for sibling, _ in _siblings(path[-1], end))):
            node.hold_checkpoint(end, snapshot)
        # Ranked before others are evicted: the first to go is the one that this supersedes.
        recent = self._rank_path(path)
        self.shrink(self.max_bytes - nbytes)
        use = self._order.history.first()
        self._order.put(weakref.ref(snapshot), use._replace(recent=max(use.recent, recent)))
        self._rank(snapshot)
        return True

    def touch(self, snapshot: Snapshot) -> None:
        """Record that a sequence resumed from it."""
        self._order.touch(weakref.ref(snapshot))

    def shrink(self, max_bytes: int) -> None:
        """Evict snapshots that are not pinned until all take at most so many bytes."""
        excess = self.nbytes - max_bytes
        passed, ranked = 0, set()
        while excess > 0 and passed < len(self._order):
            snapshot = self._order[passed]()
            if snapshot is None or snapshot.pins:
                passed += 1
            elif snapshot not in ranked:
                # What it is for may have changed since: the state behind it was evicted, say.
                ranked.add(snapshot)
                self._rank(snapshot)
                passed = 0
            else:
                self._order.discard(weakref.ref(snapshot))
                snapshot.states = None
                excess -= snapshot.nbytes

    def _has_room(self, nbytes: int) -> bool:
        """Whether so many bytes fit beside what cannot be evicted."""
        pinned = [each for each in self._live() if each.pins]
        return sum(each.nbytes for each in (*pinned, *self._remembered)) + nbytes <= self.max_bytes

    def _live(self) -> list[Snapshot]:
        """Those that somebody still holds, in the order of eviction."""
        known = {reference: reference() for reference in self._order}
        for reference, snapshot in known.items():
            if snapshot is None:
                self._order.discard(reference)
        return [snapshot for snapshot in known.values() if snapshot is not None]

    def _rank_path(self, path: Sequence[Node]) -> float:
        """Rank all snapshots of a path. Returns the recent uses of the last one before the end,
        with which a new one at the end goes on; 0 if another prompt has parted between them."""
        before: tuple[Node, int, Snapshot] | None = None  # where the last one is
        recent = 0.0
        for node in path:
            for end, snapshot in live_snapshots(node):
                snapshot.place = weakref.ref(node), end
                self._rank(snapshot)
                if weakref.ref(snapshot) in self._order:
                    before = node, end, snapshot
                elif before is not None and _next_snapshot(*before[:2]) is snapshot:
                    use = self._order.use_of(weakref.ref(before[2]))
                    recent = self._order.history.stored(use).recent
        return recent

    def _rank(self, snapshot: Snapshot) -> None:
        reference = weakref.ref(snapshot)
        place = _place_of(snapshot)
        if place is None or reference not in self._order:
            return
        node, end = place
        position = _begin(node) + end
        tokens = position - _position_before(node, end)
        saving = tokens / max(1, snapshot.nbytes)
        self._savings.add(saving)
        use = self._order.use_of(reference)._replace(
            position=position,
            tokens=tokens,
            nbytes=snapshot.nbytes,
            saving=saving / self._savings.value,
            is_superseded=_next_snapshot(node, end, of_prompts=True) is not None,
        )
        self._order.put(reference, use)


def live_snapshots(node: Node) -> list[tuple[int, Snapshot]]:
    """The snapshots that a node still holds, each with the number of the node's tokens before it,
    in order."""
    known = sorted(node.checkpoints.items(), key=lambda each: each[0])
    return [
        (end, each) for end, each in known if isinstance(each, Snapshot) and each.states is not None
    ]


def _place_of(snapshot: Snapshot) -> tuple[Node, int] | None:
    """A node of the index that holds a snapshot, and how many of its tokens are before it; None if
    that node has gone. A sibling may hold the snapshot still."""
    reference, end = snapshot.place or (lambda: None, 0)
    node = reference()
    if node is None or node.parent is None or node.parent.children.get(node.tokens) is not node:
        return None
    return node, end


def _begin(node: Node) -> int:
    """How many tokens of its prompt are before a node."""
    return node.use.position - len(node.tokens)


def _position_before(node: Node, end: int) -> int:
    """The position of the snapshot before one; 0 without any."""
    earlier = [each for each, _ in live_snapshots(node) if each < end]
    while not earlier and node.parent is not None:
        node = node.parent
        earlier = [each for each, _ in live_snapshots(node)]
    return _begin(node) + earlier[-1] if earlier else 0


def _next_snapshot(node: Node, end: int, *, of_prompts: bool = False) -> Snapshot | None:
    """The snapshot behind one, maybe only those of prompts and not of answers; None if there is
    none, or if prompts have parted before it. O(nodes between them)."""
    while True:
        later, found = next(
            (
                each
                for each in live_snapshots(node)
                if each[0] > end and not (of_prompts and each[1].is_answer)
            ),
            (len(node.tokens), None),
        )
        # Another prompt has the tokens up to here, and then others.
        if any(common < later for _, common in _siblings(node, end)):
            return None
        if found is not None or not node.children:
            return found
        # With several children, the test above says whether they have parted before the snapshot.
        node, end = node.children.peekitem(0)[1], 0


def _siblings(node: Node, least: int) -> Iterator[tuple[Node, int]]:
    """The siblings of a node that have at least so many first tokens in common with it, and how
    many. They are its neighbours in the order of tokens."""
    assert node.parent is not None
    children = node.parent.children
    at = children.index(node.tokens)
    for step in (-1, 1):
        other = at + step
        while 0 <= other < len(children):
            tokens, sibling = children.peekitem(other)
            common = common_prefix(tokens, node.tokens)
            if common < least:
                break
            yield sibling, common
            other += step
