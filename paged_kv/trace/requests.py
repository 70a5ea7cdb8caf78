"""Finds in a trace the requests that were served: when they came, how long they became, and how
many ran at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from statistics import median

from paged_kv.admission.pool_size import GroupSize, PoolSize
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.format_slabs import FormatSlabs
from paged_kv.trace.recorder import TraceEvent
from paged_kv.trace.shared_prompts import Runs, runs_of


@dataclass
class TracedRequest:
    """A request. Each choice of a request to the server counts as one.

    Attributes:
        pool: the number of its pool.
        arrives: milliseconds since the trace began.
        prompt: tokens of its prompt.
        most: the most tokens that it was allowed to generate.
        answer: tokens that it generated; `most` while it has not ended.
        begins, ends: milliseconds since the trace began; None if it does not.
        runs: the full pages of its prompt, which it shares with others.
    """

    pool: int
    arrives: int
    prompt: int
    most: int
    answer: int
    begins: int | None = None
    ends: int | None = None
    runs: Runs = ()


@dataclass
class _Group:
    pool: int
    entries: int
    page_format: str = ""
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def block_bytes(self) -> int:
        """Of a full block."""
        return self.sizes.get(self.page_format, next(iter(self.sizes.values()), 0))

    def blocks_for(self, page_size: int, tokens: int) -> int:
        blocks = -(-tokens // page_size)
        return min(blocks, self.entries) if self.entries else blocks


def _slack(groups: list[_Group], budget: ByteBudget) -> int:
    """As `Reclaimer.slack` of a pool."""
    sizes = [
        FormatSlabs(name, size).largest_slab(budget) * size
        for group in groups
        for name, size in group.sizes.items()
    ]
    return sum(sizes) - min(sizes, default=0)


class TracedLoad:
    """The requests of a trace, and the memory of its pools. The method with the name of an event
    gets the words of its line.

    Args:
        events: of `read_trace`.
        page_size: tokens a block in the trace.

    Attributes:
        requests: in the order of their arrival.
        page_size: tokens a block in the trace.
        preemptions: how often one was preempted.
        running_most: the most that ran at once.
    """

    def __init__(self, events: list[list[str]], page_size: int) -> None:
        self.preemptions = 0
        self.running_most = 0
        self.page_size = page_size
        self._now = 0
        self._budgets: dict[int, int] = {}
        self._groups: dict[int, _Group] = {}
        self._requests: dict[int, TracedRequest] = {}
        self._running: set[int] = set()
        for letter, *words in events:
            handle = getattr(self, f"_{TraceEvent(letter).name.lower()}", None)
            if handle is not None:
                handle(*words)

    @property
    def requests(self) -> list[TracedRequest]:
        return list(self._requests.values())

    @property
    def pools(self) -> list[int]:
        """The numbers of the pools that have requests."""
        return sorted({request.pool for request in self._requests.values()})

    def step_ms(self, chunk: int) -> float:
        """Milliseconds of a step, in which a request generates a token or computes `chunk` tokens
        of its prompt, as most requests had it."""
        known = [
            (each.ends - each.begins) / (-(-each.prompt // chunk) + each.answer)
            for each in self.requests
            if each.begins is not None and each.ends is not None
        ]
        return max(median(known), 0.001) if known else 1.0

    def pool_size(self, pool: int, max_bytes: int | None = None) -> PoolSize:
        """The memory of a pool, with the recorded budget or another one."""
        groups = [group for group in self._groups.values() if group.pool == pool]
        sizes = [
            GroupSize(
                group.block_bytes,
                partial(group.blocks_for, self.page_size),
                is_ring=bool(group.entries),
            )
            for group in groups
        ]
        budget = ByteBudget(max_bytes or self._budgets[pool])
        return PoolSize(budget.max_bytes, _slack(groups, budget), tuple(sizes), self.page_size)

    def pages_that_fit(self, pool: int, max_bytes: int | None = None) -> int:
        """How many pages of a prompt fit in a pool's budget; none if it has no layers that share
        pages."""
        size = self.pool_size(pool, max_bytes)
        page_bytes = size.shared_bytes(self.page_size)
        return size.budget // page_bytes if page_bytes else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a block of every group, of the pool in which these are most."""
        sizes = [
            sum(
                max(group.sizes.values(), default=0)
                for group in self._groups.values()
                if group.pool == pool
            )
            for pool in self._budgets
        ]
        return max(sizes, default=0)

    def _time(self, milliseconds: str) -> None:
        self._now += int(milliseconds)

    def _pool(self, number: str, _: str, nbytes: str, name: str = "") -> None:
        self._budgets[int(number)] = int(nbytes)

    def _group(self, number: str, pool: str, *shape: str) -> None:
        entries, head, *_ = map(int, " ".join(shape).split())
        known = self._groups.setdefault(int(number), _Group(int(pool), 0))
        known.pool, known.entries = int(pool), entries + head if entries else 0

    def _block_bytes(self, group: str, nbytes: str, page_format: str) -> None:
        known = self._groups.setdefault(int(group), _Group(-1, 0))
        known.sizes[page_format] = int(nbytes)

    def _new_table(self, table: str, group: str, page_format: str, first: str = "") -> None:
        self._groups[int(group)].page_format = page_format

    def _arrive(self, number: str, pool: str, prompt: str, most: str) -> None:
        request = TracedRequest(int(pool), self._now, int(prompt), int(most), answer=int(most))
        request.runs = self._runs(int(number), request)
        self._requests[int(number)] = request

    def _share_prompt(self, number: str, other: str, pages: str) -> None:
        request, like = self._requests[int(number)], self._requests[int(other)]
        request.runs = self._runs(int(number), request, like.runs, int(pages))

    def _runs(self, number: int, request: TracedRequest, like: Runs = (), shared: int = 0) -> Runs:
        return runs_of(number, max(0, request.prompt - 1) // self.page_size, like, shared)

    def _begin(self, number: str) -> None:
        request = self._requests[int(number)]
        if request.begins is None:
            request.begins = self._now
        self._running.add(int(number))
        self.running_most = max(self.running_most, len(self._running))

    def _preempt(self, number: str) -> None:
        self._running.discard(int(number))
        self.preemptions += 1

    def _end(self, number: str, tokens: str) -> None:
        request = self._requests[int(number)]
        request.answer, request.ends = int(tokens), self._now
        self._running.discard(int(number))
