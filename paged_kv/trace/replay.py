"""Replays a trace through the allocator, with other parameters.

Tables, forks, rings, reference counts, the prefix index and its eviction are the ones that serve;
only pages are missing, so any page size will do. Two things are not known: what a sequence would
have written that was refused for want of memory, so it ends there; and which pages would have
become smaller because memory is short, so none do. A prefix that is no longer held when a sequence
begins with it is computed again: its tokens take blocks of their own.

What rings have passed is kept as long as it was, or until room is needed. With pages of another
size it is not: which tokens share a page is another matter then. Rings that began with such pages
are computed again. What was found counts by the tokens of layers without a window, if there are
any.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefixes.eviction import LEAST_WORTH, EvictionPolicy
from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlock
from paged_kv.allocator.ring import Ring
from paged_kv.allocator.writes import Write, blocks_needed, reserve
from paged_kv.monitor.process_view import History, PoolView, Sample
from paged_kv.pool.stats import PoolStats, no_stats
from paged_kv.trace.recorder import PAGE_SIZE, VERSION, TraceEvent
from paged_kv.trace.simulated_pool import (
    SimulatedGroup,
    SimulatedPool,
    SimulatedTable,
    token_of,
)

# The least number of snapshots; a plot is about this many pixels wide.
SAMPLES = 500

# They differ with other parameters, or `requests` reads them.
IGNORED = {
    *(TraceEvent.COPY_ON_WRITE, TraceEvent.EVICT_PREFIX, TraceEvent.ARRIVE, TraceEvent.BEGIN),
    *(TraceEvent.SHARE_PROMPT, TraceEvent.PREEMPT, TraceEvent.END),
}


@dataclass(frozen=True)
class Parameters:
    """The parameters of a replay; None keeps what was recorded.

    Attributes:
        page_size: tokens a block.
        max_bytes: the budget of each pool.
        keeps_prefixes: whether the prefix index caches prefixes.
        policy: which of them it evicts first.
    """

    page_size: int = PAGE_SIZE
    max_bytes: int | None = None
    keeps_prefixes: bool = True
    policy: EvictionPolicy = LEAST_WORTH


@dataclass(frozen=True)
class Outcome:
    """The result of a replay: bytes and counts of all pools.

    Attributes:
        sequences: block tables that were created.
        refused: block tables that ended because the pool was exhausted.
        tokens_asked, tokens_found: of prompts, in the prefix index.
        evicted: blocks' worth of cached tokens that were evicted.
        cow_copies: blocks that were copied.
        peak_mapped, peak_active, peak_allocated: the most bytes at any time.
        fragmentation_at_peak: the share of active bytes without a live token, when most bytes were
            allocated.
        stats: the statistics at the end.
    """

    sequences: int
    refused: int
    tokens_asked: int
    tokens_found: int
    evicted: int
    cow_copies: int
    peak_mapped: int
    peak_active: int
    peak_allocated: int
    fragmentation_at_peak: float
    stats: PoolStats


def read_trace(path: Path) -> list[list[str]]:
    """The events of a trace, each split into words.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no trace, or of another version.
    """
    # A binary file is not a trace: refuse it instead of failing to decode it.
    with path.open(errors="replace") as file:
        header = _header(file.readline())
        if header.get("paged_kv_trace") != VERSION:
            raise ValueError(
                f"{path} is no trace of version {VERSION}: PAGED_KV_TRACE=FILE records one, and "
                "`paged-kv trace synthesize FILE` makes one up"
            )
        # A process that was killed may have left its last line half-written.
        lines = [line for line in file if line.endswith("\n")]
        return [line.strip().split(None, 4) for line in lines if line.strip()]


def _header(line: str) -> dict[str, object]:
    with suppress(ValueError):
        content = json.loads(line)
        if isinstance(content, dict):
            return content
    return {}


class Replay:
    """One run of a trace. The method with the name of an event gets the words of its line.

    Args:
        events: of `read_trace`.
        parameters: of the replay.

    Attributes:
        samples: snapshots, evenly spaced over the events.
        peak: the pools with their maps, when most bytes were active.
    """

    def __init__(self, events: list[list[str]], parameters: Parameters) -> None:
        self.samples: list[Sample] = []
        self.peak: tuple[PoolView, ...] = ()
        self._events = events
        self._parameters = parameters
        self._seconds = 0.0
        self._budgets: dict[int, ByteBudget] = {}
        self._pools: dict[int, SimulatedPool] = {}
        self._groups: dict[int, SimulatedGroup] = {}
        self._tables: dict[int, SimulatedTable] = {}
        self._sizes: dict[int, dict[str, int]] = {}
        self._prefixes: dict[int, tuple[int, ...]] = {}
        self._out_of_window: dict[int, OutOfWindowBlock] = {}
        self._tags = count(1)
        self._made = self._refused = 0
        self._peaks: Counter[str] = Counter()
        self._peak_stats: PoolStats | None = None

    def run(self) -> Outcome:
        """Replay all events.

        Raises:
            ValueError: an event is not one of this version's; the message says which.
        """
        every = max(1, len(self._events) // SAMPLES)
        for number, (letter, *words) in enumerate(self._events):
            try:
                event = TraceEvent(letter)
                if event not in IGNORED:
                    getattr(self, f"_{event.name.lower()}")(*words)
            except (LookupError, TypeError, ValueError) as error:
                raise ValueError(
                    f"line {number + 2} of the trace makes no sense: {letter} {' '.join(words)}"
                ) from error
            if not number % every or number == len(self._events) - 1:
                self._sample()
        return self._outcome()

    def history(self, title: str) -> History:
        """The history of the pools; call it after `run`."""
        return History(title, tuple(self.samples), self.peak)

    @property
    def pools(self) -> tuple[PoolView, ...]:
        """Views of the pools, with their maps."""
        return tuple([pool.view(number) for number, pool in self._pools.items()])

    def _time(self, milliseconds: str) -> None:
        self._seconds += int(milliseconds) / 1000

    def _pool(self, number: str, budget: str, nbytes: str, name: str = "") -> None:
        max_bytes = self._parameters.max_bytes or int(nbytes)
        shared = self._budgets.setdefault(int(budget), ByteBudget(max_bytes))
        page_size = self._parameters.page_size
        self._pools[int(number)] = SimulatedPool(name, shared, page_size, self._parameters.policy)

    def _block_bytes(self, group: str, nbytes: str, page_format: str) -> None:
        size = -(-int(nbytes) * self._parameters.page_size // PAGE_SIZE)
        self._sizes.setdefault(int(group), {})[page_format] = size
        if int(group) in self._groups:
            self._groups[int(group)].resize(page_format, size)

    def _group(self, number: str, pool: str, *shape: str) -> None:
        entries, head, window, keep = map(int, " ".join(shape).split())
        ring = None
        if window:
            ring = Ring(entries, head, window, keep)
            if self._parameters.page_size != PAGE_SIZE:
                size = self._parameters.page_size
                # Rings are made for the longest write, which by default is this.
                span = window + min(window, PAGE_SIZE) - 1
                ring = replace(ring, entries=-(-span // size), head=-(-keep // size))
        owner = self._pools[int(pool)]
        group = SimulatedGroup(owner, ring, self._sizes[int(number)])
        self._groups[int(number)] = group
        owner.groups.append(group)

    def _new_table(self, table: str, group: str, page_format: str, first: str = "") -> None:
        owner = self._groups[int(group)]
        made = owner.allocator.new_table(owner.ring, page_format, first or page_format)
        self._tables[int(table)] = SimulatedTable(owner, made, next(self._tags))
        self._made += 1

    def _write(self, number: str, start: str, end: str, fresh: str) -> None:
        table = self._tables.get(int(number))
        if table is not None and not self._reserve(table, int(start), int(end)):
            self._refused += 1
            self._drop(number)

    def _reserve(self, table: SimulatedTable, start: int, end: int) -> bool:
        allocator, pool = table.group.allocator, table.group.pool
        table.recode(start)

        def fits() -> bool:
            with suppress(PoolExhausted):
                needs = blocks_needed([Write(table.table, start, end)])
                allocator.room_after(needs, allocator.budget.left)
                return True
            return False

        if not fits():
            pool.evicted += pool.out_of_window.evict(fits) + pool.index.evict(fits)
        if not fits():
            pool.give_back()
            pool.evicted += pool.index.forget(fits) + pool.out_of_window.evict(fits)
        try:
            reserve(table.table, start, end)
        except PoolExhausted:
            return False
        table.write(start, end)
        return True

    def _fork(self, number: str, fork: str) -> None:
        table = self._tables.get(int(number))
        if table is not None:
            forked = table.group.allocator.fork(table.table)
            copy = SimulatedTable(table.group, forked, next(self._tags), list(table.tokens))
            copy.was_furthest = table.was_furthest
            table.tag = next(self._tags)
            self._tables[int(fork)] = copy
            self._made += 1

    def _trim(self, number: str, tokens: str) -> None:
        table = self._tables.get(int(number))
        if table is not None:
            table.trim(int(tokens), next(self._tags))

    def _drop(self, number: str) -> None:
        table = self._tables.pop(int(number), None)
        if table is not None:
            table.group.allocator.drop(table.table)

    def _insert_prefix(self, number: str, tokens: str, prefix: str, _: str) -> None:
        table = self._tables.get(int(number))
        if table is None:
            return
        known = tuple(table.tokens[: int(tokens)])
        self._prefixes[int(prefix)] = known
        if self._parameters.keeps_prefixes:
            allocator, size = table.group.allocator, self._parameters.page_size
            blocks = [{allocator: b} for b in table.table.blocks[: -(-len(known) // size)]]
            table.group.pool.index.insert("", known, blocks)

    def _adopt_prefix(self, number: str, tokens: str, prefix: str) -> None:
        table = self._tables.get(int(number))
        if table is None:
            return
        # A prefix that a refused sequence would have left is one that nobody knows.
        known = self._prefixes.get(int(prefix), ())[: int(tokens)]
        known += tuple(self._fresh(len(known), int(tokens)))
        pool, size = table.group.pool, self._parameters.page_size
        match = pool.index.match("", [*known, -1])
        found = match.num_tokens
        blocks = [node.blocks[table.group.allocator] for node in match.nodes]
        table.group.allocator.retain(blocks)
        table.table.change(tuple(blocks), len(blocks) * size)
        table.table.truncate(found)
        table.tokens = list(known)
        pool.note_found(table.group, found)
        if found < len(known) and not self._reserve(table, found, len(known)):
            self._refused += 1
            self._drop(number)

    @property
    def _follows_rings(self) -> bool:
        parameters = self._parameters
        return parameters.keeps_prefixes and parameters.page_size == PAGE_SIZE

    def _cache_ring_block(self, number: str, table: str, entry: str) -> None:
        holder = self._tables.get(int(table))
        if holder is not None and self._follows_rings:
            block = holder.table.blocks[int(entry)]
            out_of_window = holder.group.pool.out_of_window.cache(holder.group.allocator, block)
            self._out_of_window[int(number)] = out_of_window

    def _cache_unseen_block(self, number: str, group: str, page_format: str) -> None:
        owner = self._groups[int(group)]
        if not self._follows_rings:
            return
        # As when it was recorded, it is kept only where there is room.
        with suppress(PoolExhausted):
            blocks = owner.allocator.allocate(1, page_format)
            self._out_of_window[int(number)] = owner.pool.out_of_window.cache(
                owner.allocator, blocks[0]
            )
            owner.allocator.release(blocks)

    def _evict_block(self, number: str) -> None:
        self._out_of_window.pop(int(number), None)

    def _begin_ring(self, number: str, tokens: str, *out_of_window: str) -> None:
        table = self._tables.get(int(number))
        if table is None:
            return
        known = [self._out_of_window.get(int(each)) for each in " ".join(out_of_window).split()]
        blocks = [each.block for each in known if each is not None and each.block is not None]
        if len(blocks) < len(known) or not known:
            if not self._reserve(table, 0, int(tokens)):
                self._refused += 1
                self._drop(number)
            return
        table.group.allocator.retain(blocks)
        table.table.change(tuple(blocks), int(tokens))
        table.was_furthest = int(tokens)
        table.group.pool.note_found(table.group, int(tokens))

    def _fresh(self, start: int, end: int) -> Iterator[int]:
        tag = next(self._tags)
        return (token_of(tag, at) for at in range(start, end))

    def _look_up(self, pool: str, tokens: str, found: str) -> None:
        self._pools[int(pool)].tokens_asked += int(tokens)

    def _sample(self) -> None:
        stats = self._stats()
        self.samples.append(Sample(self._seconds, stats))
        if stats.bytes_allocated >= self._peaks["allocated"]:
            self._peak_stats = stats
        if stats.bytes_active > self._peaks["active"]:
            self.peak = self.pools
        for name in ("allocated", "active", "mapped"):
            self._peaks[name] = max(self._peaks[name], getattr(stats, f"bytes_{name}"))

    def _stats(self) -> PoolStats:
        first, *others = [pool.stats() for pool in self._pools.values()] or [no_stats()]
        budget = sum(budget.max_bytes for budget in self._budgets.values()) or 1
        return replace(sum(others, first), bytes_budget=budget)

    def _outcome(self) -> Outcome:
        stats = self._stats()
        pools = self._pools.values()
        return Outcome(
            sequences=self._made,
            refused=self._refused,
            tokens_asked=sum(pool.tokens_asked for pool in pools),
            tokens_found=sum(pool.tokens_found for pool in pools),
            evicted=sum(pool.evicted for pool in pools),
            cow_copies=stats.cow_copies,
            peak_mapped=self._peaks["mapped"],
            peak_active=self._peaks["active"],
            peak_allocated=self._peaks["allocated"],
            fragmentation_at_peak=(self._peak_stats or stats).internal_fragmentation,
            stats=stats,
        )
