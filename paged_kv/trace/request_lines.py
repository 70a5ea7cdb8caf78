"""Writes traces that hold requests only: when they come, how long they become, and which first
pages their prompts share. No trace of this kind says how long its requests took, so each takes
`STEP_MS` for a generated token, and for a step of its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from paged_kv.trace.admission_replay import CHUNK
from paged_kv.trace.recorder import PAGE_SIZE, TraceEvent, TraceFile

# About what a model of 8 billion parameters takes on one GPU while others run beside it.
STEP_MS = 30


@dataclass(frozen=True)
class TracedMemory:
    """The memory of the one pool of a trace.

    Attributes:
        token_bytes: bytes of a token in all layers.
        max_bytes: the budget.
    """

    token_bytes: int
    max_bytes: int


def duration_ms(prompt: int, answer: int) -> int:
    """How long a request runs that computes a prompt of `prompt` tokens and generates `answer`."""
    return STEP_MS * (-(-prompt // CHUNK) + answer)


class RequestLines:
    """Writes requests in the order of their arrival. Each begins when it arrives.

    Args:
        path: the file, which must be missing or empty.
        memory: of the pool.
        name: of the pool.

    Raises:
        OSError: the file cannot be written, or is not empty.
    """

    def __init__(self, path: Path, memory: TracedMemory, name: str) -> None:
        # After the first reading half a millisecond more than it is: no rounding error takes one.
        self._now = 0.0
        self._file = TraceFile(path, lambda: self._now / 1000)
        self._file.line(TraceEvent.POOL, 0, 0, memory.max_bytes, name)
        self._file.line(TraceEvent.BLOCK_BYTES, 0, memory.token_bytes * PAGE_SIZE, "fp16")
        self._file.line(TraceEvent.GROUP, 0, 0, 0, 0, 0, 0)
        self._numbers = count()
        # When running requests end, their numbers and answers: a heap.
        self._ends: list[tuple[int, int, int]] = []

    def arrive(self, now: int, prompt: int, answer: int, like: int = 0, shared: int = 0) -> int:
        """Write a request that arrives at `now` milliseconds and generates `answer` tokens; the
        first `shared` pages of its prompt are those of request `like`. Returns its number.

        Raises:
            OSError: it cannot be written.
        """
        self._end_until(now)
        self._now = now + 0.5
        number = next(self._numbers)
        self._file.line(TraceEvent.ARRIVE, number, 0, prompt, answer)
        if shared:
            self._file.line(TraceEvent.SHARE_PROMPT, number, like, shared)
        self._file.line(TraceEvent.BEGIN, number)
        heappush(self._ends, (now + duration_ms(prompt, answer), number, answer))
        return number

    def finish(self) -> None:
        """End all requests.

        Raises:
            OSError: a line cannot be written.
        """
        while self._ends:
            self._end_until(self._ends[0][0])
        self._file.flush()

    def _end_until(self, now: int) -> None:
        while self._ends and self._ends[0][0] <= now:
            ends, number, answer = heappop(self._ends)
            self._now = ends + 0.5
            self._file.line(TraceEvent.END, number, answer)


def full_pages(prompt: int) -> int:
    """The pages of a prompt that others can share: each computes its last token itself."""
    return max(0, prompt - 1) // PAGE_SIZE
