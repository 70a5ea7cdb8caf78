"""Defines the node of the prefix index, the tokens of one block and where they are cached, and the
path of nodes that matches a prompt.

`OutOfWindowBlocks` caches full blocks that a sliding window has passed. Their sequence never reads
them again, but another sequence with the same prefix could resume with them. So they stay cached
while there is room, and are evicted before anything else:

    in a ring --cache--> cached --a table retains it--> cached and in use
    cached --evict, or the last object that refers to it is collected--> free
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

from sortedcontainers import SortedDict

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.prefixes.eviction import LEAST_WORTH, EvictionOrder, EvictionPolicy, Use

Blocks = Mapping[BlockAllocator, int]
"""For each group, the block that holds the tokens."""


@dataclass(eq=False)
class _Place:
    """The place of a cached block; its block is None once it was evicted."""

    allocator: BlockAllocator
    block: int | None
    reference: weakref.ref[OutOfWindowBlock] | None = None

    @property
    def known(self) -> OutOfWindowBlock | None:
        return self.reference() if self.reference else None

    @property
    def is_in_use(self) -> bool:
        return self.block is not None and self.allocator.ref_count(self.block) > 1


class OutOfWindowBlock:
    """A reference to a cached block, held by those who know its tokens. The block is released when
    the last reference is collected."""

    def __init__(self, place: _Place) -> None:
        self.ends = 0  # cached prefixes that end with it, and so need it: it stays for them
        self.pins = 0  # pinned prefixes that hold it
        self._place = place

    @property
    def block(self) -> int | None:
        """None once it was evicted."""
        return self._place.block


class OutOfWindowBlocks:
    """Cached out-of-window blocks of a pool. Callers hold the lock of the blocks' allocators."""

    def __init__(self, policy: EvictionPolicy = LEAST_WORTH) -> None:
        self._order: EvictionOrder[_Place] = EvictionOrder(policy)
        self._places: dict[tuple[BlockAllocator, int], _Place] = {}
        self._dropped: deque[_Place] = deque()

    def cache(self, allocator: BlockAllocator, block: int) -> OutOfWindowBlock:
        """Cache a block that is in use. A block that is cached already keeps its reference."""
        self.drain()
        place = self._places.get((allocator, block))
        if place is not None:
            if (known := place.known) is not None:
                return known
            # Its last reference was collected just now.
            self._evict(place)
        place = _Place(allocator, block)
        allocator.refs.keep(block, partial(self._on_move, allocator))
        out_of_window = OutOfWindowBlock(place)
        place.reference = weakref.ref(out_of_window)
        self._order.touch(place)
        self._places[allocator, block] = place
        weakref.finalize(out_of_window, self._dropped.append, place).atexit = False
        return out_of_window

    def touch(self, out_of_window: OutOfWindowBlock) -> None:
        """Record that a sequence resumed with it."""
        self._order.touch(out_of_window._place)

    def evict(self, is_enough: Callable[[], bool]) -> int:
        """Evict blocks in the order of the policy until it is enough; returns how many. Those that
        a prefix ends with stay with it.

        Blocks in use by a table go last: evicting one only saves a ring from copying it.
        """
        self.drain()
        evicted = 0
        for place in sorted(self._order, key=lambda place: place.is_in_use):
            out_of_window = place.known
            if is_enough():
                break
            if out_of_window is not None and not out_of_window.ends and not out_of_window.pins:
                self._evict(place)
                evicted += 1
        return evicted

    def evictable(self, allocator: BlockAllocator) -> list[int]:
        """Blocks of a group that are neither in use nor pinned."""
        self.drain()
        return [
            block
            for (owner, block), place in self._places.items()
            if owner is allocator
            and not place.is_in_use
            and not ((known := place.known) and known.pins)
        ]

    def drain(self) -> None:
        """Release blocks whose last reference was collected."""
        # Finalisers append in the middle of anything; both operations are atomic.
        while self._dropped:
            self._evict(self._dropped.popleft())

    def _evict(self, place: _Place) -> None:
        if place.block is not None:
            self._order.discard(place)
            del self._places[place.allocator, place.block]
            place.allocator.evict(place.block)
            place.block = None

    def _on_move(self, allocator: BlockAllocator, source: int, target: int) -> None:
        place = self._places.pop((allocator, source))
        place.block = target
        self._places[allocator, target] = place


@dataclass(frozen=True)
class WindowSlots:
    """Some of a node's tokens, in slots [first, last) of a block of a group with a window."""

    out_of_window: OutOfWindowBlock
    first: int
    last: int
    is_end: bool  # a prefix ends here, so that a later prompt can resume from its window


Windows = Mapping[BlockAllocator, Sequence[WindowSlots]]
"""For each group with a window, where it holds the tokens."""


class Checkpoint(Protocol):
    """A state from which a sequence can resume after a token; opaque to the index."""

    pins: int


class Owner(NamedTuple):
    """Whose a prompt is.

    Attributes:
        salt: only prompts with the same salt share prefixes.
        session: the session's name; None for prompts of no session, which cannot be ended.
    """

    salt: Hashable
    session: Hashable = None


@dataclass(eq=False)
class Node:
    """One block of a prefix."""

    tokens: tuple[int, ...]  # those of a leaf may be fewer than a full block
    blocks: dict[BlockAllocator, int]  # of each group whose sequences keep all their tokens
    parent: Node | None  # None for a root, which has no tokens
    children: SortedDict[tuple[int, ...], Node] = field(default_factory=SortedDict)
    # The tokens held in groups with a window, by (first, last) slot.
    windows: dict[BlockAllocator, dict[tuple[int, int], WindowSlots]] = field(default_factory=dict)
    # States to resume from, by the number of this node's tokens before them.
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    path_hash: int = 0  # of all tokens up to this block's end, and their namespace
    use: Use = field(default_factory=lambda: Use(0, 0))
    pins: int = 0
    owners: set[Owner] = field(default_factory=set)  # those with a prompt that ends with it
    namespace: Hashable = None  # of a root, that of its prompts

    @property
    def is_pinned(self) -> bool:
        """Whether a pin or a hold keeps it from eviction."""
        return self.pins > 0

    def path(self) -> list[Node]:
        """The nodes from a root's child to this one."""
        path, node = [self], self.parent
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def slots_of(self, allocator: BlockAllocator) -> list[WindowSlots]:
        """The tokens that a group with a window still holds."""
        known = self.windows.get(allocator, {}).values()
        return [slots for slots in known if slots.out_of_window.block is not None]

    def hold(self, allocator: BlockAllocator, slots: WindowSlots) -> None:
        """Hold slots of a group with a window, unless the node holds the same slots."""
        held = self.windows.setdefault(allocator, {})
        known = held.get((slots.first, slots.last))
        if known is not None:
            is_there = known.out_of_window.block is not None
            if is_there and known.is_end >= slots.is_end:
                return
            self._count(known, -1)
        held[slots.first, slots.last] = slots
        self._count(slots, 1)

    def hold_checkpoint(self, end: int, checkpoint: Checkpoint) -> None:
        """Hold the state after the first `end` tokens, replacing an earlier one."""
        replaced = self.checkpoints.get(end)
        if replaced is not None:
            replaced.pins -= self.pins
        self.checkpoints[end] = checkpoint
        checkpoint.pins += self.pins

    def inherit(self, other: Node, num_tokens: int) -> None:
        """Take over the windows and checkpoints within the first tokens of a node that has the same
        `num_tokens` first tokens."""
        for end, checkpoint in other.checkpoints.items():
            if end <= num_tokens:
                self.hold_checkpoint(end, checkpoint)
        for allocator, held in other.windows.items():
            for slots in held.values():
                if slots.last <= num_tokens:
                    self.hold(allocator, slots)

    def demote_windows(self, allocator: BlockAllocator) -> None:
        """Let no prefix end here any more in a group with a window: its blocks may go as those that
        the window has passed."""
        for slots in list(self.windows.get(allocator, {}).values()):
            if slots.is_end:
                passed = replace(slots, is_end=False)
                self._count(slots, -1)
                self._count(passed, 1)
                self.windows[allocator][slots.first, slots.last] = passed

    def release_windows(self) -> None:
        for slots in self._all_slots():
            self._count(slots, -1)
        self.windows.clear()

    def add_pins(self, change: int) -> None:
        """Add `change` pins to this node, its windows and its checkpoints."""
        self.pins += change
        for slots in self._all_slots():
            slots.out_of_window.pins += change
        for checkpoint in self.checkpoints.values():
            checkpoint.pins += change

    def _all_slots(self) -> Iterable[WindowSlots]:
        return chain.from_iterable(held.values() for held in self.windows.values())

    def _count(self, slots: WindowSlots, change: int) -> None:
        slots.out_of_window.ends += change * slots.is_end
        slots.out_of_window.pins += change * self.pins


@dataclass(frozen=True)
class Match:
    """The longest computed prefix of a prompt."""

    nodes: tuple[Node, ...]  # its blocks, in order; of the last one maybe not all tokens match
    num_tokens: int
