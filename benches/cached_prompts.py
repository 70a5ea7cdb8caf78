"""Finds how much of their prompts eviction policies keep cached, for `benches.eviction`.

Pages: one prompt comes after the other. It looks its pages up, makes room, and caches all of them,
or as many of its first ones as fit. The prefix index is the one that serves, with the id of a page
in the place of a token and a block of one byte in the place of a page. What a running request holds
besides, generated tokens and sliding windows are not counted.

`ForeseenPages` tells the most that any policy could find, because it knows the future: it evicts
the page that is used again last (Belady 1966, "A study of replacement algorithms for a
virtual-storage computer"). A page is used again no later than those behind it, so these go before
it, as in the index.

Recurrent states: one stands for all tokens before it, so a prompt resumes from the deepest state on
its path. It leaves a state behind its last full page, and one where it parted from all prompts
before it. States are all equally large, and N of them fit.

`ForeseenStates` evicts the state that is found again last, as if memory were unlimited. Other than
with pages that is no bound: states save different numbers of tokens, and a prompt may find one that
is less deep. `lru` and others may find more in rare cases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from heapq import heappop, heappush
from itertools import takewhile
from typing import Protocol

from benches.page_loads import Pages
from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes.eviction import EvictionPolicy
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.prefix.snapshots import Snapshots, live_snapshots

# A page in use is used again before all others.
_IN_USE = -1
# The id of no page.
_NO_PAGE = -1


class Cache(Protocol):
    """Caches pages."""

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
        self._capacity = capacity
        self._index = PrefixIndex(page_size=1, policy=policy)
        # The index counts pages, so slabs may be mapped in part.
        self._allocator = BlockAllocator(ByteBudget(4 * capacity + 64), block_bytes=1)

    def serve(self, prompt: Pages) -> int:
        kept = prompt[: self._capacity]
        # `match` leaves out a prompt's last token, and all of these count.
        found = self._index.match("", [*kept, _NO_PAGE])
        blocks = [node.blocks[self._allocator] for node in found.nodes]
        self._allocator.refs.retain(blocks)
        room = self._capacity - (len(kept) - len(blocks))
        self._index.evict(lambda: len(self._index) <= room)
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


class States(Protocol):
    """Keeps states, each by the path of pages before it."""

    def find(self, path: Pages) -> int:
        """How many first pages of a path the deepest state on it has behind it; 0 without one."""
        ...

    def hold(self, path: Pages, end: int) -> None:
        """Hold the state behind the first `end` pages of a prompt's path; before its last page,
        other prompts part there."""
        ...


class RankedStates:
    """Keeps the states that a policy ranks highest, in the order that serves. O(pages + n) for n
    states.

    Args:
        capacity: how many states fit.
        policy: chooses the states to evict.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self._index = PrefixIndex(page_size=1)
        self._states = Snapshots(capacity, policy)  # a state has one byte

    def find(self, path: Pages) -> int:
        # `match` leaves out a prompt's last token, and all of these count.
        nodes = self._index.match("", [*path, _NO_PAGE]).nodes
        for end in range(len(nodes), 0, -1):
            for _, state in live_snapshots(nodes[end - 1]):
                self._states.touch(state)
                return end
        return 0

    def hold(self, path: Pages, end: int) -> None:
        nodes = self._index.insert("", path[:end], [{}] * end)
        self._states.keep(nodes, 1, states=True, nbytes=1, is_answer=False)


class ForeseenStates:
    """Keeps the states that are found again soonest. O(pages + log n) for n states.

    Args:
        capacity: how many states fit.
        prompts: the paths of all prompts, in their order.
    """

    def __init__(self, capacity: int, prompts: Sequence[Pages]) -> None:
        self._capacity = capacity
        self._never, self._now = len(prompts), 0
        self._uses = _uses_of_all_states(prompts)
        self._held: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def find(self, path: Pages) -> int:
        end = _deepest(path, self._held)
        self._now += 1
        if end:
            self._note(path[end - 1])
        return end

    def hold(self, path: Pages, end: int) -> None:
        self._note(path[end - 1])
        while len(self._held) > self._capacity:
            next_use, page = heappop(self._heap)
            if self._held.get(page) == -next_use:
                del self._held[page]

    def _note(self, page: int) -> None:
        """Look up when a state is found next, from now on."""
        uses = self._uses[page]
        while uses and uses[-1] < self._now:
            uses.pop()
        next_use = uses[-1] if uses else self._never
        if self._held.get(page) != next_use:
            self._held[page] = next_use
            heappush(self._heap, (-next_use, page))


def ends_of_states(prompts: Iterable[Pages]) -> Iterable[tuple[Pages, list[int]]]:
    """For each path, behind how many pages it leaves states: where it parts from those before, and
    at its end. A prompt that only continues another one parts from none."""
    seen: set[int] = set()
    continued: set[int] = set()
    for path in prompts:
        common = _common(path, seen)
        parts = common and path[common - 1] in continued
        seen.update(path)
        continued.update(path[:-1])
        ends = (common, len(path)) if parts else (len(path),)
        yield path, [end for end in dict.fromkeys(ends) if end]


def replay_states(states: States, prompts: Sequence[Pages]) -> int:
    """How many pages prompts find before the states that they resume from."""
    found = 0
    for path, ends in ends_of_states(prompts):
        found += states.find(path)
        for end in ends:
            states.hold(path, end)
    return found


def _uses_of_all_states(prompts: Sequence[Pages]) -> defaultdict[int, list[int]]:
    """For each state, which prompts would find it if none were evicted, the last one first."""
    uses: defaultdict[int, list[int]] = defaultdict(list)
    left: set[int] = set()
    for number, (path, ends) in enumerate(ends_of_states(prompts)):
        if end := _deepest(path, left):
            uses[path[end - 1]].append(number)
        left.update(path[end - 1] for end in ends)
    for each in uses.values():
        each.reverse()
    return uses


def _deepest(path: Pages, states: Container[int]) -> int:
    """How many first pages of a path the deepest of these states has behind it."""
    return next((end for end in range(len(path), 0, -1) if path[end - 1] in states), 0)


def _common(path: Pages, seen: set[int]) -> int:
    """How many first pages of a path were seen."""
    return next((at for at, page in enumerate(path) if page not in seen), len(path))
