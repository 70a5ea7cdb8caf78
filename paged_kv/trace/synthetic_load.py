"""Makes up a load and writes it as a trace that can be replayed.

Sequences grow together, one page of tokens a turn, like the sequences of a batch. When complete,
some are dropped and replaced by a new one; the others stay, like conversations that may be
continued. This needs no model and no memory: the allocator counts bytes and never touches them.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.block_table import BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.events import Events
from paged_kv.allocator.writes import reserve
from paged_kv.trace.recorder import PAGE_SIZE, TracedPool, TraceFile


@dataclass(frozen=True)
class Load:
    """The parameters of a load; equal parameters give equal loads.

    Attributes:
        sequences: how many run at once.
        shortest, longest: tokens of a sequence, drawn uniformly.
        churn: the share of the sequences that end and are replaced, 0 to 1.
        seed: draws the lengths and the sequences that end.
    """

    sequences: int
    shortest: int
    longest: int
    churn: float = 0.5
    seed: int = 0


def synthesize(load: Load, token_bytes: int, max_bytes: int, path: Path) -> None:
    """Write the trace of a load whose tokens take `token_bytes` in all layers. In the traced pool
    the whole load fits; `max_bytes` is the budget that a replay begins with.

    Raises:
        ValueError: token_bytes or max_bytes is not positive.
        OSError: the file cannot be written.
    """
    # Each reading of the clock advances it by a millisecond.
    written = count()
    file = TraceFile(path, lambda: next(written) / 1000)
    events = TracedPool(file, ByteBudget(max_bytes), "synthetic")
    everything = ByteBudget(2 * load.sequences * (load.longest + PAGE_SIZE) * token_bytes * 64)
    block_bytes = token_bytes * PAGE_SIZE
    allocator = BlockAllocator(everything, block_bytes, PAGE_SIZE, events=events)
    _Run(allocator, load, events).finish()
    file.flush()


@dataclass
class _Sequence:
    table: BlockTable
    final_tokens: int
    is_replaced: bool
    tokens: int = 0


class _Run:
    """One run of a load: the sequences that still grow."""

    def __init__(self, allocator: BlockAllocator, load: Load, events: Events) -> None:
        self._allocator = allocator
        self._events = events
        self._lengths = _lengths(load)
        replaced = _chosen_to_end(load)
        self._growing = deque(self._start(i in replaced) for i in range(load.sequences))

    def finish(self) -> None:
        """Grow every sequence by a page of tokens in turn, until all are complete."""
        while self._growing:
            sequence = self._growing.popleft()
            end = min(sequence.tokens + PAGE_SIZE, sequence.final_tokens)
            reserve(sequence.table, sequence.tokens, end)
            sequence.tokens = end
            if sequence.tokens < sequence.final_tokens:
                self._growing.append(sequence)
                continue
            self._events.ended(sequence.table)
            if sequence.is_replaced:
                self._allocator.drop(sequence.table)
                self._growing.append(self._start(is_replaced=False))

    def _start(self, is_replaced: bool) -> _Sequence:
        """A new sequence, whose request is a prompt only."""
        sequence = _Sequence(self._allocator.new_table(), next(self._lengths), is_replaced)
        self._events.arrived(sequence.table, sequence.final_tokens, 0)
        self._events.begun(sequence.table)
        return sequence


def _lengths(load: Load) -> Iterator[int]:
    numbers = random.Random(f"lengths of {load.seed}")
    while True:
        yield numbers.randint(load.shortest, load.longest)


def _chosen_to_end(load: Load) -> set[int]:
    count = round(load.churn * load.sequences)
    numbers = random.Random(f"ends of {load.seed}")
    return set(numbers.sample(range(load.sequences), count))
