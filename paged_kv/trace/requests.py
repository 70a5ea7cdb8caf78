"""Finds in a trace the requests that were served: when they came, and how long they became.

A request is a chain of tables, each a fork of the one before, that together write its tokens. If
two forks write after the same tokens, the second one begins another request with these tokens as
its prompt. Writes of more than 16 tokens are of prompts, as a trace joins shorter ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from paged_kv.admission.pool_size import GroupSize, PoolSize
from paged_kv.pool.trace import JOINED_TOKENS, TraceEvent


@dataclass
class TracedRequest:
    """A request.

    Attributes:
        pool: the number of its pool.
        arrives: milliseconds since the trace began, at its first write; None before it.
        prompt: tokens of its prompt.
        answer: tokens that it generated.
        answers_from, answers_until: milliseconds since the trace began, at the first generated
            token and at the last one.
    """

    pool: int
    arrives: int | None = None
    prompt: int = 0
    answer: int = 0
    answers_from: int = 0
    answers_until: int = 0

    @property
    def tokens(self) -> int:
        """Of the prompt and of the answer."""
        return self.prompt + self.answer


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


class TracedLoad:
    """The requests of a trace, and the memory of its pools.

    Args:
        events: of `read_trace`.
        page_size: tokens a block in the trace.
    """

    def __init__(self, events: list[list[str]], page_size: int) -> None:
        self.requests: list[TracedRequest] = []
        self._page_size = page_size
        self._now = 0
        self._budgets: dict[int, int] = {}
        self._groups: dict[int, _Group] = {}
        self._tables: dict[int, TracedRequest] = {}
        handlers: dict[str, Callable[..., None]] = {
            TraceEvent.TIME: self._pass,
            TraceEvent.POOL: self._add_pool,
            TraceEvent.GROUP: self._add_group,
            TraceEvent.BLOCK_BYTES: self._size,
            TraceEvent.NEW_TABLE: self._make,
            TraceEvent.FORK: self._fork,
            TraceEvent.WRITE: self._write,
            TraceEvent.TRIM: self._trim,
            TraceEvent.ADOPT_PREFIX: self._adopt,
        }
        for letter, *words in events:
            if letter in handlers:
                handlers[letter](*words)

    @property
    def step_ms(self) -> float:
        """Milliseconds from one token of a request to its next, as most requests had it."""
        known = [
            (each.answers_until - each.answers_from) / each.answer
            for each in self.requests
            if each.answer > 1
        ]
        return max(median(known), 0.001) if known else 1.0

    def pool_size(self, pool: int, max_bytes: int | None) -> PoolSize:
        """The memory of a pool, with the recorded budget or another one."""
        groups = [
            GroupSize(
                group.block_bytes,
                partial(group.blocks_for, self._page_size),
                is_ring=bool(group.entries),
            )
            for group in self._groups.values()
            if group.pool == pool
        ]
        return PoolSize(max_bytes or self._budgets[pool], 0, tuple(groups), self._page_size)

    def _pass(self, milliseconds: str) -> None:
        self._now += int(milliseconds)

    def _add_pool(self, number: str, _: str, nbytes: str, name: str = "") -> None:
        self._budgets[int(number)] = int(nbytes)

    def _add_group(self, number: str, pool: str, *shape: str) -> None:
        entries, head, *_ = map(int, " ".join(shape).split())
        known = self._groups.setdefault(int(number), _Group(int(pool), 0))
        known.pool, known.entries = int(pool), entries + head if entries else 0

    def _size(self, group: str, nbytes: str, page_format: str) -> None:
        known = self._groups.setdefault(int(group), _Group(-1, 0))
        known.sizes[page_format] = int(nbytes)

    def _make(self, table: str, group: str, page_format: str) -> None:
        self._groups[int(group)].page_format = page_format
        pool = self._groups[int(group)].pool
        if min(n for n, each in self._groups.items() if each.pool == pool) == int(group):
            self._tables[int(table)] = TracedRequest(pool)

    def _fork(self, table: str, fork: str) -> None:
        if int(table) in self._tables:
            self._tables[int(fork)] = self._tables[int(table)]

    def _write(self, table: str, start: str, end: str, _: str) -> None:
        request = self._tables.get(int(table))
        if request is None:
            return
        if int(start) < request.tokens:
            # A fork has written after these tokens already.
            request = TracedRequest(request.pool, prompt=int(start))
            self._tables[int(table)] = request
        if request.arrives is None:
            request.arrives = self._now
            self.requests.append(request)
        self._grow(request, int(start), int(end))

    def _grow(self, request: TracedRequest, start: int, end: int) -> None:
        if end - start > JOINED_TOKENS or not request.tokens:
            request.prompt, request.answer = end, 0
            return
        if not request.answer:
            request.answers_from = self._now
        request.answer = end - request.prompt
        request.answers_until = self._now

    def _trim(self, table: str, tokens: str) -> None:
        request = self._tables.get(int(table))
        if request is not None and int(tokens) < request.tokens:
            request.prompt = min(request.prompt, int(tokens))
            request.answer = int(tokens) - request.prompt

    def _adopt(self, table: str, tokens: str, _: str) -> None:
        if int(table) in self._tables:
            self._tables[int(table)].prompt = int(tokens)
