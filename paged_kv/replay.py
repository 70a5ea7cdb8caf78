"""Replays a made-up workload through the allocator alone, to see what paging wastes.

Sequences grow together, a page's worth of tokens in each turn, as the rows of a batch do. Some
end when they have all their tokens and are dropped, and a new one takes their place; the others
stay, as conversations do that may be continued. No model and no memory is needed: the allocator
counts bytes and never touches them.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.errors import PoolExhausted


@dataclass(frozen=True)
class Workload:
    """What is replayed; a seed makes it the same each time.

    Attributes:
        sequences: how many are wanted at once.
        shortest, longest: tokens of a sequence, every length in between as likely.
        churn: the share of the sequences that end and are replaced, 0 to 1.
        seed: chooses the lengths, and who ends.
    """

    sequences: int
    shortest: int
    longest: int
    churn: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class ReplayResult:
    """What the pool holds when every sequence has ended or has all its tokens.

    Attributes:
        sequences_started: all that ever began; each is live, ended, or did not fit.
        sequences_live: those that still hold their tokens.
        sequences_ended: those that were dropped with all their tokens, and replaced.
        allocation_failures: those that the budget did not hold; dropped when that showed.
        slabs: slabs mapped.
        allocated_tokens: tokens of live sequences.
        active_tokens: tokens that the pages in use have room for.
        allocated_bytes: bytes of live tokens.
        active_bytes: bytes of pages in use.
        mapped_bytes: bytes of all slabs.
        peak_mapped_bytes: the most bytes of slabs at any time.
        budget_bytes: the limit of mapped bytes.
        page_size: tokens of a page.
    """

    sequences_started: int
    sequences_live: int
    sequences_ended: int
    allocation_failures: int
    slabs: int
    allocated_tokens: int
    active_tokens: int
    allocated_bytes: int
    active_bytes: int
    mapped_bytes: int
    peak_mapped_bytes: int
    budget_bytes: int
    page_size: int

    @property
    def utilisation(self) -> float:
        """The share of mapped bytes that hold live tokens."""
        return _ratio(self.allocated_bytes, self.mapped_bytes)

    @property
    def internal_waste(self) -> float:
        """The share of active bytes that are rows behind the last token of a sequence."""
        return 1 - _ratio(self.allocated_bytes, self.active_bytes)

    @property
    def external_fragmentation(self) -> float:
        """The share of mapped bytes that are free pages."""
        return 1 - _ratio(self.active_bytes, self.mapped_bytes)

    @property
    def mean_waste_tokens(self) -> float:
        """Rows behind the last token, per live sequence; for mixed lengths about half a page."""
        return (self.active_tokens - self.allocated_tokens) / max(1, self.sequences_live)


def replay(
    workload: Workload, token_bytes: int, max_bytes: int, page_size: int = 256
) -> ReplayResult:
    """Run a workload in a pool of `max_bytes` whose tokens take `token_bytes` in all layers.

    O(pages of all sequences).

    Raises:
        ValueError: page_size, token_bytes or max_bytes is not positive.
    """
    allocator = BlockAllocator(ByteBudget(max_bytes), token_bytes * page_size, page_size)
    run = _Run(allocator, workload)
    run.finish()
    stats = allocator.stats()
    allocated_tokens = sum(sequence.tokens for sequence in run.live)
    return ReplayResult(
        sequences_started=run.started,
        sequences_live=len(run.live),
        sequences_ended=run.ended,
        allocation_failures=stats.allocation_failures,
        slabs=stats.slabs,
        allocated_tokens=allocated_tokens,
        active_tokens=stats.blocks_used * page_size,
        allocated_bytes=allocated_tokens * token_bytes,
        active_bytes=stats.bytes_active,
        mapped_bytes=stats.bytes_mapped,
        peak_mapped_bytes=run.peak_mapped,
        budget_bytes=max_bytes,
        page_size=page_size,
    )


@dataclass
class _Sequence:
    table: BlockTable
    final_tokens: int
    is_replaced: bool
    tokens: int = 0


class _Run:
    """The state of a replay: who is growing, and who has all its tokens and stays."""

    def __init__(self, allocator: BlockAllocator, workload: Workload) -> None:
        self.live: list[_Sequence] = []
        self.started = 0
        self.ended = 0
        self.peak_mapped = 0
        self._allocator = allocator
        self._lengths = _lengths(workload)
        replaced = _chosen_to_end(workload)
        self._growing = deque(self._start(i in replaced) for i in range(workload.sequences))

    def finish(self) -> None:
        """Give every sequence a page's worth of tokens in turn, until none is growing."""
        while self._growing:
            sequence = self._growing.popleft()
            try:
                self._grow(sequence)
            except PoolExhausted:
                self._end(sequence)
            else:
                self._settle(sequence)

    def _start(self, is_replaced: bool) -> _Sequence:
        self.started += 1
        return _Sequence(self._allocator.new_table(), next(self._lengths), is_replaced)

    def _grow(self, sequence: _Sequence) -> None:
        end = min(sequence.tokens + self._allocator.page_size, sequence.final_tokens)
        sequence.table.reserve(sequence.tokens, end)
        sequence.tokens = end
        self.peak_mapped = max(self.peak_mapped, self._allocator.budget.mapped)

    def _settle(self, sequence: _Sequence) -> None:
        if sequence.tokens < sequence.final_tokens:
            self._growing.append(sequence)
        elif sequence.is_replaced:
            self.ended += 1
            self._end(sequence)
        else:
            self.live.append(sequence)

    def _end(self, sequence: _Sequence) -> None:
        self._allocator.drop(sequence.table)
        if sequence.is_replaced:
            self._growing.append(self._start(is_replaced=False))


def _lengths(workload: Workload) -> Iterator[int]:
    numbers = random.Random(f"lengths of {workload.seed}")
    while True:
        yield numbers.randint(workload.shortest, workload.longest)


def _chosen_to_end(workload: Workload) -> set[int]:
    count = round(workload.churn * workload.sequences)
    numbers = random.Random(f"ends of {workload.seed}")
    return set(numbers.sample(range(workload.sequences), count))


def _ratio(part: int, whole: int) -> float:
    # Nothing mapped wastes nothing.
    return part / whole if whole else 1.0
