"""Preempts and resumes sequences of mlx-lm's BatchGenerator, so that no step of a batch runs out of
pages while a later sequence could make room.

BatchGenerator lets every sequence begin for which there is a place. This holds back those for which
there is no memory. Before each step it reserves the blocks of all running sequences. When the pool
does not hold them, the `Scheduler` preempts the latest sequence:

- its pages go to the prefix cache, where they are evicted only if needed;
- what its next tokens depend on is kept: the sampled token that it has not returned yet, the
  sampler with its random key, the tokens for logits processors, the matcher of stop words;
- it waits at the head of the line, under the same uid.

It returns with what is still cached, or can be read from a page store in less time than it takes to
compute, and computes only the rest again. Then it continues with the kept token, so its text is
what it would have been.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from time import perf_counter
from typing import Any, Protocol

from mlx_lm.generate import BatchGenerator, GenerationBatch

from paged_kv.admission.growth import Growth, has_room
from paged_kv.admission.scheduler import Scheduler
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.integrations.batching.pool_memory import pool_size
from paged_kv.integrations.batching.rows import (
    Waiting,
    chunk_length,
    first_paged,
    generating_row,
    growths,
    is_at_last_token,
    merged_cache,
)
from paged_kv.integrations.batching.shared_prefill import Reuses, Tokens, without_first
from paged_kv.pool.page_pool import PagePool
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.ranks import Ranks
from paged_kv.sequences.step_blocks import reserve
from paged_kv.sequences.step_row import StepRow

Responses = tuple[list[Any], list[Any]]

logger = logging.getLogger("paged_kv")

_ATTACHED = "paged_kv_preemption"
# With fewer tokens of prompts, a step's time is that of the tokens that others generate in it.
_FEW_TOKENS = 16


class PagedFactory(Reuses, Protocol):
    """Makes, finds and keeps the prompt caches of one model."""

    pool: PagePool
    prefixes: PrefixCache
    ranks: Ranks

    def make_cache(self, max_kv_size: int | None = None) -> list[Any]: ...

    def can_admit(self, tokens: int) -> bool: ...


class Preemption:
    """The running and the waiting sequences of one BatchGenerator. It is the scheduler's `Runner`.

    Sequences whose caches are of another pool, or hold tokens that BatchGenerator was not told,
    cannot be preempted, as nothing could compute them again.

    Args:
        generator: BatchGenerator.
        factory: makes the caches of its model, which has layers with pages.

    Attributes:
        salts: of sequences that share prompts with their like only, by uid.
    """

    def __init__(self, generator: BatchGenerator, factory: PagedFactory) -> None:
        # This makes the pool learn the size of a block.
        factory.can_admit(0)
        self._generator: Any = weakref.proxy(generator)
        self._factory = factory
        self._pool = factory.pool
        self._ranks = factory.ranks
        self._scheduler = Scheduler(self)
        self._known: set[int] = set()
        self._generating: dict[int, GenerationBatch] = {}
        # The tokens that a sequence held when it was preempted, and where its prompt ends.
        self._held: dict[int, int] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._error: PoolExhausted | None = None
        self.salts: dict[int, Hashable] = {}

    def step(self) -> Responses:
        """BatchGenerator's step, with the sequences that have room.

        Raises:
            PoolExhausted: the pool does not hold the next step of the earliest sequence alone;
                nothing was changed.
        """
        self._learn()
        self._rejoin()
        running = sorted(self._known.intersection(self._running_uids()))
        waiting = [each.uid for each in self._line()]
        if not self._scheduler.schedule(running, waiting, self._places()):
            error, self._error = self._error, None
            assert error is not None, "schedule stops only after a failed reservation"
            raise error
        prompts, generated = self._timed_step(set(waiting))
        for response in generated:
            self._scheduler.note_token(response.uid)
        return [self._told(each) for each in prompts], generated

    def has_room(self, number: int, running: list[int]) -> bool:
        begun = [each.growth for each in self._line() if each.uid in running]
        nbytes = self._waiting(number).growth.bytes_to_begin(pool_size(self._pool))
        return self._ranks.agree("room", self._fits(nbytes, begun))

    def can_begin(self, nbytes: int) -> bool:
        """Whether a new sequence that takes so many bytes could begin at once."""
        return not self._generator._unprocessed_sequences and self._fits(nbytes, [])

    def reserve(self, running: list[int]) -> bool:
        return self._try(self._reserve_step, behind=-1)

    def begin(self, number: int) -> bool:
        each = self._waiting(number)
        if number in self._held:
            each = self._fetched(each)
            self._replace(each)
        count = chunk_length(each.segments, self._generator.prefill_step_size)
        if not self._try(lambda: self._reserve(each.cache, [count]), behind=number):
            self._give_back(each)
            return False
        self._note_begun(each)
        if number in self._generating and each.is_at_last_token:
            self._remove_waiting(number)
            cache = merged_cache(self._generator.model, number, each.cache)
            self._resume(number, cache, each.tokens)
        return True

    def preempt(self, number: int) -> None:
        """Let a running sequence wait without its pages."""
        stage, at = self._generator._find_uids([number])[number]
        each = self._interrupted(at) if stage == 1 else self._paused(at)
        self._generator.remove([number])
        line = self._generator._unprocessed_sequences
        line.append(self._without_pages(each))
        self._generator._unprocessed_sequences = deque(sorted(line, key=lambda other: other[0]))
        self._pool.counts.preemptions += 1
        logger.info("sequence %d is preempted, after %d tokens", number, len(each.tokens))

    def _paused(self, at: int) -> Waiting:
        """A generating sequence as one that waits. Its kept token stands for the last of its
        prompt."""
        batch = self._generator._generation_batch
        uid, row = batch.uids[at], generating_row(batch, at)
        self._generating[uid] = row
        return Waiting(
            uid,
            [[int(batch._next_tokens[at])]],
            batch.max_tokens[at] - batch._num_tokens[at],
            batch.extract_cache(at),
            batch.tokens[at],
            *(batch.samplers[at], batch.logits_processors[at], batch.stop_sequences[at]),
        )

    def _interrupted(self, at: int) -> Waiting:
        """A sequence whose prompt is being computed as one that waits."""
        batch = self._generator._prompt_batch
        segments, _, total = self._generator._currently_processing[at]
        uid = batch.uids[at]
        self._prompt_tokens.setdefault(uid, total)
        return Waiting(
            uid,
            segments,
            batch.max_tokens[at],
            batch.extract_cache(at),
            batch.tokens[at],
            *(batch.samplers[at], batch.logits_processors[at], batch.stop_sequences[at]),
        )

    def _without_pages(self, each: Waiting) -> Waiting:
        """A waiting sequence whose pages only the prefix cache holds."""
        cache = first_paged(each.cache)
        assert cache is not None, "sequences without pages are not preempted"
        # A reserved block that was not written is not worth keeping.
        for sequence in cache.sequences:
            sequence.shrink()
        self._factory.insert_cache(each.tokens, each.cache, salt=self.salts.get(each.uid))
        self._held[each.uid] = len(each.tokens)
        segments = [segment for segment in [each.tokens, *each.segments] if segment]
        return each._replace(segments=segments, cache=self._factory.make_cache(), tokens=[])

    def _fetched(self, each: Waiting) -> Waiting:
        """A waiting sequence with the pages that are still cached."""
        tokens = each.all_tokens
        counts = self._pool.counts
        read_before = counts.tokens_read
        cache, cached = self._factory.fetch_cache(tokens, salt=self.salts.get(each.uid))
        counts.tokens_reread += counts.tokens_read - read_before
        segments = without_first(each.segments, cached)
        return each._replace(segments=segments, cache=cache, tokens=tokens[:cached])

    def _give_back(self, each: Waiting) -> None:
        """Undo what was fetched or reserved for a sequence that could not begin on every rank."""
        if each.uid in self._held:
            held = self._held[each.uid]
            self._replace(self._without_pages(each))
            self._held[each.uid] = held
        elif cache := first_paged(each.cache):
            for sequence in cache.sequences:
                sequence.shrink()

    def _note_begun(self, each: Waiting) -> None:
        held = self._held.pop(each.uid, 0)
        self._pool.counts.tokens_recomputed += max(0, held - len(each.tokens))

    def _rejoin(self) -> None:
        """Let preempted sequences generate again whose tokens are computed."""
        processing = self._generator._currently_processing
        for uid in [uid for uid in self._generator._prompt_batch.uids if uid in self._generating]:
            at = self._generator._prompt_batch.uids.index(uid)
            if is_at_last_token(processing[at][0]):
                batch = self._generator._prompt_batch.split([at])
                del processing[at]
                self._resume(uid, batch.prompt_cache, batch.tokens[0])

    def _resume(self, uid: int, prompt_cache: list[Any], tokens: Tokens) -> None:
        row = self._generating.pop(uid)
        row.prompt_cache, row.tokens = prompt_cache, [tokens]
        self._generator._generation_batch.extend(row)

    def _reserve_step(self) -> None:
        """Reserve the blocks of the next step of all running sequences."""
        generator = self._generator
        batch = generator._generation_batch
        if batch.uids:
            self._reserve(batch.prompt_cache, [1] * len(batch.uids))
        self._reserve(generator._prompt_batch.prompt_cache, self._chunks())

    def _chunks(self) -> list[int]:
        """The number of tokens that the next step computes of each running prompt."""
        generator = self._generator
        size = generator.prefill_step_size
        return [chunk_length(each[0], size) for each in generator._currently_processing]

    def _reserve(self, prompt_cache: list[Any], counts: list[int]) -> None:
        cache = first_paged(prompt_cache)
        if cache is None or cache.pool is not self._pool or not counts:
            return
        counted = zip(cache.sequences, counts, strict=True)
        reserve(self._pool, [StepRow.next(each, cache.layer, count) for each, count in counted])

    def _fits(self, nbytes: int, begun: list[Growth]) -> bool:
        in_use = self._pool.stats().bytes_active
        running = [*growths(self._generator), *begun]
        return has_room(nbytes, running, pool_size(self._pool), in_use)

    def _try(self, work: Callable[[], None], behind: int) -> bool:
        """Whether the work succeeds on every rank, if need be without the pages of the sequences
        that wait behind this one."""
        while True:
            errors = self._ranks.gather("blocks", _shortage(work))
            self._error = next((error for error in errors if error is not None), None)
            if self._error is None:
                return True
            if not self._take_pages(behind):
                return False

    def _take_pages(self, behind: int) -> bool:
        """Let sequences wait without their pages; false if none has any."""
        holders = [
            each
            for each in self._line()
            if each.uid > behind and each.tokens and each.uid in self._known
        ]
        for each in holders:
            self._replace(self._without_pages(each))
        return bool(holders)

    def _learn(self) -> None:
        """Note which new sequences can be preempted, and forget those that have ended."""
        line = self._line()
        for each in line:
            cache = first_paged(each.cache)
            if cache is not None and cache.pool is self._pool and cache.size() == len(each.tokens):
                self._known.add(each.uid)
        if len(self._known) > len(line) + len(self._running_uids()):
            uids = {each.uid for each in line}.union(self._running_uids())
            self._known &= uids
            for gone in (self._generating, self._held, self._prompt_tokens, self.salts):
                for uid in [uid for uid in gone if uid not in uids]:
                    del gone[uid]

    def _timed_step(self, held_back: set[int]) -> Responses:
        """As `_step_without`; notes how long prompts take."""
        tokens = sum(self._chunks())
        began = perf_counter()
        responses = self._step_without(held_back)
        if tokens > _FEW_TOKENS:
            self._factory.prefixes.rates.computing.note(tokens, perf_counter() - began)
        return responses

    def _step_without(self, held_back: set[int]) -> Responses:
        """BatchGenerator's step without some of the waiting sequences."""
        generator = self._generator
        waiting = [each for each in generator._unprocessed_sequences if each[0] in held_back]
        # Only the deque may hold the others: a reference to their caches would keep pages shared.
        for _ in waiting:
            generator._unprocessed_sequences.pop()
        try:
            prompts, generated = BatchGenerator._next(generator)
            return prompts, generated
        finally:
            generator._unprocessed_sequences.extend(waiting)

    def _told(self, response: Any) -> Any:
        """A response about a prompt, with the progress in the whole prompt."""
        uid = response.uid
        done, total = response.progress
        if uid in self._generating:
            response.end_of_segment = False
        elif uid in self._prompt_tokens:
            whole = self._prompt_tokens[uid]
            response.progress = (max(0, whole - (total - done)), whole)
        return response

    def _places(self) -> int:
        generator = self._generator
        prompts = generator.prefill_batch_size - len(generator._prompt_batch)
        rows = generator.completion_batch_size - len(generator._generation_batch)
        return int(min(prompts, rows))

    def _running_uids(self) -> list[int]:
        return [*self._generator._generation_batch.uids, *self._generator._prompt_batch.uids]

    def _line(self) -> list[Waiting]:
        return [Waiting(*each) for each in self._generator._unprocessed_sequences]

    def _waiting(self, number: int) -> Waiting:
        return next(each for each in self._line() if each.uid == number)

    def _replace(self, each: Waiting) -> None:
        line = self._generator._unprocessed_sequences
        at = next(index for index, other in enumerate(line) if other[0] == each.uid)
        line[at] = each

    def _remove_waiting(self, number: int) -> None:
        self._generator._unprocessed_sequences = deque(
            [each for each in self._generator._unprocessed_sequences if each[0] != number]
        )


def _shortage(work: Callable[[], None]) -> PoolExhausted | None:
    """Do some work; returns the error if the pool does not hold what it needs."""
    try:
        work()
    except PoolExhausted as error:
        # Frames of the traceback hold sequences, and so their blocks.
        error.__context__ = None
        return error.with_traceback(None)
    return None


def attach(generator: BatchGenerator, factory: PagedFactory) -> Preemption | None:
    """Let a generator's steps preempt sequences, from now on. None if its model has no pages."""
    preemption: Preemption | None = getattr(generator, _ATTACHED, None)
    if preemption is None and factory.pool.num_layers:
        preemption = Preemption(generator, factory)
        setattr(generator, _ATTACHED, preemption)
        # Of this generator only, which keeps it if the factory is uninstalled before it ends.
        setattr(generator, BatchGenerator._next.__name__, preemption.step)
    return preemption
