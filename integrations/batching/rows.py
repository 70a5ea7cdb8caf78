"""Reads and cuts the batches of mlx-lm's BatchGenerator, whose parts have no names of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch

from paged_kv.admission.pool_size import Growth
from paged_kv.integrations.batching.prompt_caches import first_paged
from paged_kv.integrations.batching.prompt_segments import Tokens, without_first
from paged_kv.integrations.batching.short_memory import Responses
from paged_kv.integrations.mlx_lm_internals import BatchParts, GeneratorParts, next_of


class Waiting(NamedTuple):
    """A sequence that waits, as BatchGenerator keeps it."""

    uid: int  # its number
    segments: list[Tokens]  # the tokens to compute; the last segment is the last token alone
    max_tokens: int  # the most tokens to generate
    cache: list[Any]  # its prompt cache
    tokens: Tokens  # the tokens that the cache holds
    sampler: Any
    processors: Any
    stops: Any

    @property
    def all_tokens(self) -> Tokens:
        """Held and to compute."""
        return [*self.tokens, *chain.from_iterable(self.segments)]

    @property
    def growth(self) -> Growth:
        known = len(self.tokens)
        ((held, length),) = token_counts(self.cache) or [(known, known)]
        prompt = length + sum(map(len, self.segments))
        return Growth(held, prompt, prompt + self.max_tokens, _owns_last_page(self.cache))

    def starting_with(self, cache: list[Any], cached: int) -> Waiting:
        """The same sequence with a prompt cache that holds its first `cached` tokens."""
        segments = without_first([self.tokens, *self.segments], cached)
        return self._replace(segments=segments, cache=cache, tokens=self.all_tokens[:cached])


@dataclass(frozen=True, eq=False)
class Request:
    """What a sequence is for, which BatchGenerator does not know."""

    priority: int = 0  # sequences with the lowest begin first
    # The uid that it is sorted by among those of its priority; None for its own
    arrival: int | None = None
    salt: Hashable = None  # it shares prompts with sequences of the same salt only
    session: Hashable = None  # that its prompt is part of
    since: float = field(default_factory=monotonic)  # when it arrived, by `time.monotonic`
    # Called with the number of its cached tokens when it begins for the first time
    when_begun: Callable[[int], object] = lambda cached: None
    # Called with tokens and a cache that holds them, where a segment of its prompt ends and where
    # its answer ends; None to keep no more than what others wait for.
    keep: Callable[[Tokens, list[Any]], object] | None = None


NO_REQUEST = Request()


class Requests(dict[int, Request]):
    """What sequences are for, by uid: of those that are for a request."""

    def of(self, uid: int) -> Request:
        return self.get(uid, NO_REQUEST)

    def order(self, uid: int) -> tuple[int, tuple[int, int]]:
        """What sequences are sorted by: priority and arrival."""
        request = self.of(uid)
        arrival = uid if request.arrival is None else request.arrival
        return request.priority, (arrival, uid)


class WaitingQueue:
    """The sequences of a BatchGenerator that wait, sorted by the `order` of their uids."""

    def __init__(self, generator: Any, order: Callable[[int], Any]) -> None:
        self._parts = GeneratorParts(generator)
        self._order = order

    def __len__(self) -> int:
        return len(self._parts.waiting)

    def __iter__(self) -> Iterator[Waiting]:
        # Over a copy, so that sequences may be replaced meanwhile.
        return iter([Waiting(*each) for each in self._parts.waiting])

    def __getitem__(self, uid: int) -> Waiting:
        return next(each for each in self if each.uid == uid)

    def put(self, waiting: Waiting) -> None:
        """Add a sequence, or replace the one with this uid."""
        self.remove(waiting.uid)
        self._parts.waiting.append(waiting)
        self.sort()

    def sort(self) -> None:
        """Put those in order that BatchGenerator has added at the end."""
        self._parts.put_in_line(sorted(self._parts.waiting, key=lambda each: self._order(each[0])))

    def remove(self, uid: int) -> None:
        self._parts.put_in_line([each for each in self._parts.waiting if each[0] != uid])


def is_at_last_token(segments: list[Tokens]) -> bool:
    return len(segments) == 1 and len(segments[0]) == 1


def chunk_length(segments: list[Tokens], step_size: int) -> int:
    """The number of tokens that BatchGenerator computes next for a prompt."""
    return min(len(segments[0]), step_size)


def prompt_chunks(generator: BatchGenerator) -> list[int]:
    """The number of tokens that the next step computes of each running prompt."""
    size = generator.prefill_step_size
    return [chunk_length(each[0], size) for each in GeneratorParts(generator).processing]


def free_places(generator: BatchGenerator, *, in_turns: bool) -> int:
    """The number of sequences that may begin. In turns, they take the places of prompts that are
    being computed."""
    parts = GeneratorParts(generator)
    reading = len(parts.reading)
    rows = generator.completion_batch_size - len(parts.generating) - reading
    return min(generator.prefill_batch_size - (0 if in_turns else reading), rows)


def running_uids(generator: BatchGenerator) -> list[int]:
    parts = GeneratorParts(generator)
    return [*parts.generating.uids, *parts.reading.uids]


@contextmanager
def hidden_prompts(generator: Any) -> Iterator[None]:
    """Lets BatchGenerator's steps compute nothing of the prompts that have begun before."""
    parts = GeneratorParts(generator)
    # A batch of the same class, as others than mlx-lm's may compute prompts.
    hidden, processing = copy(parts.reading), parts.processing
    hidden.prompt_cache = [*hidden.prompt_cache]
    parts.reading.filter([])
    parts.processing = []
    try:
        yield
    finally:
        hidden.extend(parts.reading)
        parts.reading, parts.processing = hidden, [*processing, *parts.processing]


def step_with(generator: BatchGenerator, begun: set[int]) -> Responses:
    """BatchGenerator's step, in which these of the waiting sequences begin, and no others."""
    parts = GeneratorParts(generator)
    waiting = [each for each in parts.waiting if each[0] not in begun]
    # Only the deque may hold the others: a reference to their caches would keep pages shared.
    parts.put_in_line([each for each in parts.waiting if each[0] in begun])
    try:
        prompts, generated = next_of(generator)
        return prompts, generated
    finally:
        parts.put_in_line([*parts.waiting, *waiting])


def token_counts(prompt_cache: list[Any]) -> list[tuple[int, int]]:
    """Of each sequence the tokens that blocks are reserved for, written or not, and those that are
    written, which may be more than BatchGenerator knows."""
    cache = first_paged(prompt_cache)
    if cache is None:
        return []
    groups = [group for group in cache.pool.groups if group.is_open]
    return [
        (max([each.table(group).tokens for group in groups], default=0), each.length)
        for each in cache.sequences
    ]


def _owns_last_page(prompt_cache: list[Any]) -> bool:
    """Whether the cache's one sequence writes its next token without a copy. The last one of a
    request's choices does: the others have copied the page that all began with."""
    cache = first_paged(prompt_cache)
    if cache is None:
        return False
    (sequence,) = cache.sequences
    tables = [sequence.table(group) for group in cache.pool.groups if group.is_open]
    return all(table.owns(sequence.length, sequence.length + 1) for table in tables)


def growths(generator: BatchGenerator) -> Iterator[tuple[int, Growth]]:
    """The uids of the running sequences, and their tokens."""
    parts = GeneratorParts(generator)
    batch = parts.generating
    rows = zip(batch.uids, batch.max_tokens, BatchParts(batch).num_tokens, strict=True)
    for (held, length), (uid, most, count) in zip(
        token_counts(batch.prompt_cache), rows, strict=False
    ):
        yield uid, Growth(held, length, length + most - count)
    prompts = parts.reading
    rest = zip(prompts.uids, prompts.max_tokens, parts.processing, strict=True)
    for (held, length), (uid, most, (segments, *_)) in zip(
        token_counts(prompts.prompt_cache), rest, strict=False
    ):
        prompt = length + sum(map(len, segments))
        yield uid, Growth(held, prompt, prompt + most)


def row_as_waiting(batch: Any, at: int, segments: list[Tokens], max_tokens: int) -> Waiting:
    """Row `at` of a batch as a sequence that waits."""
    return Waiting(
        batch.uids[at],
        segments,
        max_tokens,
        batch.extract_cache(at),
        batch.tokens[at],
        *(batch.samplers[at], batch.logits_processors[at], BatchParts(batch).stops[at]),
    )


def generating_row(batch: Any, at: int) -> GenerationBatch:
    """Row `at` of a batch as a batch of its own, without its cache and its tokens: all that its
    next tokens depend on besides, such as the token that is sampled already."""
    row: GenerationBatch = GenerationBatch.empty(batch.model, batch.fallback_sampler)
    row.uids = [batch.uids[at]]
    row.samplers = [batch.samplers[at]]
    row.logits_processors = [batch.logits_processors[at]]
    row.max_tokens = [batch.max_tokens[at]]
    new, old = BatchParts(row), BatchParts(batch)
    new.stops = [old.stops[at]]
    new.next_tokens = mx.array([int(old.next_tokens[at])], dtype=mx.uint32)
    new.next_logprobs = [old.next_logprobs[at]]
    new.token_context = [old.token_context[at]]
    new.num_tokens = [old.num_tokens[at]]
    new.matchers = [old.matchers[at]]
    return row
