"""Preempts and resumes sequences of mlx-lm's BatchGenerator, so that no step of a batch runs out of
pages while a later sequence could make room, or one of a worse priority.

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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch

from paged_kv.admission.pool_size import Growth, has_room
from paged_kv.admission.scheduler import Scheduler
from paged_kv.allocator.errors import OutOfMemory, PoolExhausted
from paged_kv.integrations.batching.last_responses import LastResponses
from paged_kv.integrations.batching.prompt_caches import first_paged
from paged_kv.integrations.batching.prompt_segments import Tokens, cut_at_pages
from paged_kv.integrations.batching.prompts import PagedFactory, Prompts
from paged_kv.integrations.batching.rows import (
    Request,
    Requests,
    Waiting,
    WaitingQueue,
    chunk_length,
    free_places,
    generating_row,
    growths,
    is_at_last_token,
    prompt_chunks,
    row_as_waiting,
    running_uids,
)
from paged_kv.integrations.batching.short_memory import (
    Responses,
    Shortage,
    Shortages,
    attempted,
    if_short_again,
)
from paged_kv.integrations.mlx_lm_internals import BatchParts, GeneratorParts, set_next
from paged_kv.prefix.keeping import LookedUp
from paged_kv.steps.blocks import reserve
from paged_kv.trace import RecordedRequest

Work = Callable[[], None]

logger = logging.getLogger("paged_kv")

_ATTACHED = "paged_kv_preemption"


class Preemption:
    """The running and the waiting sequences of one BatchGenerator: their only queue. It is the
    scheduler's `Runner`.

    Sequences whose caches are of another pool, or hold tokens that BatchGenerator was not told,
    cannot be preempted, as nothing could compute them again.

    Args:
        generator: BatchGenerator.
        factory: makes the caches of its model.

    Attributes:
        requests: of the sequences that are for one, by uid.
        reserve_share: the share of an answer's tokens that memory is reserved for when a sequence
            begins, 0 to 1.
        prompts: those that wait or are being computed.
        shortages: what there was no memory for.
    """

    def __init__(self, generator: BatchGenerator, factory: PagedFactory) -> None:
        # This makes the pool learn the size of a block.
        factory.can_admit(0)
        self._generator: Any = weakref.proxy(generator)
        self._parts = GeneratorParts(self._generator)
        self._factory = factory
        self._pool = factory.pool
        self._ranks = factory.ranks
        self.requests = Requests()
        self.reserve_share = 0.0
        self._queue = WaitingQueue(self._generator, self.requests.order)
        self._last_responses = LastResponses(self._pool)
        self._scheduler = Scheduler(self, self.requests.order)
        self._known: set[int] = set()
        self._generating: dict[int, GenerationBatch] = {}
        # Sequences that wait without pages: the tokens that each held when it was preempted.
        self._held: dict[int, int] = {}
        self._prompt_tokens: dict[int, int] = {}  # where the prompts of preempted ones end
        self._answered: dict[int, int] = {}  # of how many tokens their answers are
        self.shortages = Shortages(generator, self.step)
        self.prompts = Prompts(
            self._generator,
            factory,
            self._queue,
            self.requests,
            self._generating,
            self._pause,
            self.shortages,
        )
        self._error: PoolExhausted | OutOfMemory | None = None
        recorder = factory.recorder
        self._recorder = recorder if recorder is not None and recorder.is_of(self._pool) else None
        self._recorded: dict[int, RecordedRequest] = {}

    def step(self) -> Responses:
        """BatchGenerator's step, with the sequences that have room.

        Raises:
            PoolExhausted: the pool does not hold the next step of the earliest sequence alone;
                nothing was changed.
            OutOfMemory: MLX does not; the error names that sequence.
        """
        self._learn()
        self._rejoin()
        running = sorted(running_uids(self._generator), key=self.requests.order)
        self._queue.sort()
        waiting = self.prompts.begin_step()
        places = free_places(self._generator, in_turns=self.prompts.turns is not None)
        fixed = set(running) - self._known
        if not self._scheduler.schedule(running, waiting, places, fixed):
            error, self._error = self._error, None
            assert error is not None, "schedule stops only after a failed reservation"
            if isinstance(error, OutOfMemory):
                error = OutOfMemory(error.why, running[0] if running else waiting[0])
            raise error
        begun = {each.uid for each in self._queue}.intersection(running)
        prompts, generated = self.prompts.step(begun)
        for response in generated:
            self._record_token(response)
        self._last_responses.note(generated)
        return [self._of_whole_prompt(each) for each in prompts], generated

    def begin_later(self, uid: int) -> None:
        """Look up what is cached of a sequence's prompt when it begins. It was inserted with an
        empty cache."""
        self._held[uid] = 0
        self.prompts.new.add(uid)

    def has_room(self, number: int, running: list[int]) -> bool:
        while True:
            shared = 0
            if number in self._held:
                _, in_use = self.prompts.cached(number)
                shared = min(in_use, len(self._queue[number].all_tokens) - 1)
            others = [*self._running(running)]
            fits = self._fits(number, others, self._pool.bytes_active, shared)
            if self._ranks.all_true("room", fits):
                return True
            if not self._take_back():
                return False

    def would_have_room(self, number: int, running: list[int], victims: list[int]) -> bool:
        size = self._pool.size
        others = [each for each in self._running(running) if each[0] not in victims]
        # They may share pages, so that they take less than is counted here.
        in_use = sum(size.bytes_for(growth.held) for _, growth in others)
        fits = self._fits(number, others, in_use, shared_tokens=0)
        return self._ranks.all_true("way", fits)

    def awaits(self, number: int, running: list[int]) -> bool:
        awaits = not self.prompts.is_turn(number, running) or (
            number in self._held and self.prompts.awaits(number, running)
        )
        return not self._ranks.all_true("ready", not awaits)

    def _fits(
        self, number: int, others: list[tuple[int, Growth]], in_use: int, shared_tokens: int
    ) -> bool:
        """Whether a waiting sequence fits beside others, which hold `in_use` bytes, if it shares
        its first tokens with them."""
        size = self._pool.size
        growth = self._promised(number, self._queue[number].growth)
        nbytes = growth.bytes_to_begin(size) - size.shared_bytes(shared_tokens)
        return has_room(nbytes, [self._promised(*each) for each in others], size, in_use)

    def _running(self, running: list[int]) -> Iterator[tuple[int, Growth]]:
        """The tokens of the sequences that run, and of those that begin in this step."""
        yield from growths(self._generator)
        yield from ((each.uid, each.growth) for each in self._queue if each.uid in running)

    def reserve(self, running: list[int]) -> bool:
        batch = self._parts.generating

        def reserve_step() -> None:
            if batch.uids:
                self._reserve(batch.prompt_cache, [1] * len(batch.uids))
            self._reserve(self._parts.reading.prompt_cache, prompt_chunks(self._generator))

        return self._try(reserve_step, behind=None)

    def begin(self, number: int) -> bool:
        each = self._queue[number]
        if number in self._held:
            each = self._fetched(each)
            self._queue.put(each)
        if self._pool.is_reproducible:
            answered = self._answered.get(number, 0)
            segments = cut_at_pages(each.segments, len(each.tokens), answered)
            each = each._replace(segments=segments)
            self._queue.put(each)
        count = chunk_length(each.segments, self._generator.prefill_step_size)
        if not self._try(lambda: self._reserve(each.cache, [count]), behind=number):
            self._give_back(each)
            return False
        cached = len(each.tokens)
        self._pool.counts.tokens_recomputed += max(0, self._held.pop(number, 0) - cached)
        if number in self.prompts.new:
            self.prompts.new.discard(number)
            self.requests.of(number).when_begun(cached)
        if number in self._generating and is_at_last_token(each.segments):
            self._queue.remove(number)
            batch = PromptProcessingBatch(self._generator.model, [number], [each.cache])
            self._resume(number, batch.prompt_cache, each.tokens)
        return True

    def preempt(self, number: int) -> None:
        stage, at = self._parts.place_of(number)
        each = self._interrupted(at) if stage == 1 else self._paused(at)
        self._generator.remove([number])
        self._queue.put(self._without_pages(each))
        self._pool.counts.preemptions += 1
        logger.info("sequence %d is preempted, after %d tokens", number, len(each.tokens))

    def _pause(self, uid: int) -> None:
        """Let a sequence whose prompt is being computed wait with its pages."""
        _, at = self._parts.place_of(uid)
        each = self._interrupted(at)
        self._generator.remove([uid])
        _shrink(each.cache)
        self._queue.put(each)

    def _paused(self, at: int) -> Waiting:
        """A generating sequence as one that waits. Its kept token stands for the last of its
        prompt."""
        batch = self._parts.generating
        parts = BatchParts(batch)
        self._generating[batch.uids[at]] = generating_row(batch, at)
        self._answered[batch.uids[at]] = parts.num_tokens[at] + 1
        most = batch.max_tokens[at] - parts.num_tokens[at]
        return row_as_waiting(batch, at, [[int(parts.next_tokens[at])]], most)

    def _interrupted(self, at: int) -> Waiting:
        """A sequence whose prompt is being computed as one that waits."""
        batch = self._parts.reading
        segments, _, total = self._parts.processing[at]
        self._prompt_tokens.setdefault(batch.uids[at], total)
        return row_as_waiting(batch, at, segments, batch.max_tokens[at])

    def _without_pages(self, waiting: Waiting) -> Waiting:
        """A waiting sequence whose pages only the prefix cache holds."""
        assert first_paged(waiting.cache) is not None, "sequences without pages are not preempted"
        _shrink(waiting.cache)
        request = self.requests.of(waiting.uid)
        self._factory.insert_cache(
            waiting.tokens, waiting.cache, salt=request.salt, session=request.session
        )
        self._held[waiting.uid] = len(waiting.tokens)
        segments = [segment for segment in [waiting.tokens, *waiting.segments] if segment]
        return waiting._replace(segments=segments, cache=self._factory.make_cache(), tokens=[])

    def _fetched(self, waiting: Waiting) -> Waiting:
        """A waiting sequence with the pages that are still cached."""
        tokens = waiting.all_tokens
        counts = self._pool.counts
        read_before = counts.tokens_read
        salt = self.requests.of(waiting.uid).salt
        is_new = waiting.uid in self.prompts.new
        cache, cached = self._factory.fetch_cache(tokens, salt=salt if is_new else LookedUp(salt))
        counts.tokens_reread += counts.tokens_read - read_before
        found = waiting.starting_with(cache, cached)
        return self.prompts.cut(found) if is_new else found

    def _give_back(self, waiting: Waiting) -> None:
        """Undo what was fetched or reserved for a sequence that could not begin on every rank."""
        if (held := self._held.get(waiting.uid)) is None:
            _shrink(waiting.cache)
        else:
            self._queue.put(self._without_pages(waiting))
            self._held[waiting.uid] = held

    def _rejoin(self) -> None:
        """Let preempted sequences generate again whose tokens are computed."""
        processing, reading = self._parts.processing, self._parts.reading
        for uid in [uid for uid in reading.uids if uid in self._generating]:
            at = reading.uids.index(uid)
            if is_at_last_token(processing[at][0]):
                batch = reading.split([at])
                del processing[at]
                self._resume(uid, batch.prompt_cache, batch.tokens[0])

    def _resume(self, uid: int, prompt_cache: list[Any], tokens: Tokens) -> None:
        row = self._generating.pop(uid)
        row.prompt_cache, row.tokens = prompt_cache, [tokens]
        self._parts.generating.extend(row)

    def _reserve(self, prompt_cache: list[Any], counts: list[int]) -> None:
        cache = first_paged(prompt_cache)
        if cache is None or cache.pool is not self._pool or not counts:
            return
        counted = zip(cache.sequences, counts, strict=True)
        reserve(self._pool, [each.next_step(cache.layer, count) for each, count in counted])

    def _promised(self, uid: int, growth: Growth) -> Growth:
        """The tokens of a sequence that others must leave room for."""
        return growth.with_reserve(self.reserve_share if uid in self._known else 1)

    def _try(self, work: Work, behind: int | None) -> bool:
        """Whether the work succeeds on every rank, if need be with the pages of ended sequences
        that nobody has asked for, and then with those of sequences that wait behind this one, or
        of all that wait."""
        while True:
            errors = self._ranks.gather("blocks", self._shortage(work))
            self._error = next((error for error in errors if error is not None), None)
            if self._error is None:
                return True
            if not self._take_back() and not self._take_pages(behind):
                return False

    def _shortage(self, work: Work) -> PoolExhausted | OutOfMemory | None:
        """Do some work; returns the error if the pool does not hold what it needs, or if there is
        no memory for the slabs that the pool may still map."""
        try:
            shortage = attempted(partial(if_short_again, work))
        except PoolExhausted as error:
            # Frames of the traceback hold sequences, and so their blocks.
            error.__context__ = None
            return error.with_traceback(None)
        return OutOfMemory(shortage.why) if isinstance(shortage, Shortage) else None

    def _take_back(self) -> bool:
        """Take the pages of ended sequences that nobody has asked for; false if there are none."""
        # Callers drop responses at different times if a garbage collector does it.
        return any(self._ranks.gather("ended", self._last_responses.take_back()))

    def _take_pages(self, behind: int | None) -> bool:
        """Let sequences wait without their pages; false if none has any."""
        holders = [
            each
            for each in self._queue
            if (behind is None or self.requests.order(each.uid) > self.requests.order(behind))
            and each.tokens
            and each.uid in self._known
        ]
        for each in holders:
            self._queue.put(self._without_pages(each))
        return bool(holders)

    def _learn(self) -> None:
        """Note which new sequences can be preempted, and forget those that have ended."""
        line = self._queue
        for each in [each for each in line if each.uid not in self._known]:
            cache = first_paged(each.cache)
            if cache is not None and cache.pool is self._pool and cache.size() == len(each.tokens):
                self._known.add(each.uid)
                if self._recorder is not None:
                    since = (self.requests.get(each.uid) or Request()).since
                    self._recorded[each.uid] = RecordedRequest(since, each.all_tokens, [])
        running = running_uids(self._generator)
        if max(len(self._known), len(self.requests)) > len(line) + len(running):
            uids = {each.uid for each in line}.union(running)
            for uid in self._known - uids:
                self._end_record(uid)
            self._known &= uids
            self.prompts.forget_all_but(uids)
            ended: tuple[dict[int, Any], ...] = (self.requests, self._generating, self._held)
            for gone in (*ended, self._prompt_tokens, self._answered):
                for uid in [uid for uid in gone if uid not in uids]:
                    del gone[uid]

    def _record_token(self, response: Any) -> None:
        """Let an answer have one more token, and keep it with its prompt if that is the last."""
        uid, has_ended = response.uid, response.finish_reason is not None
        keep = self.requests.of(uid).keep
        if has_ended and keep is not None:
            keep(response.all_tokens[:], response.prompt_cache)
        self._scheduler.note_token(uid)
        if (recorded := self._recorded.get(uid)) is not None:
            recorded.answer.append(response.token)
            if has_ended:
                self._end_record(uid)

    def _end_record(self, uid: int) -> None:
        if self._recorder is not None and (recorded := self._recorded.pop(uid, None)) is not None:
            self._recorder.end(recorded, self.requests.of(uid).salt, self._factory.prefixes.rates)

    def _of_whole_prompt(self, response: Any) -> Any:
        """A response about a prompt, with the progress in the whole prompt."""
        uid = response.uid
        done, total = response.progress
        if uid in self._generating:
            response.end_of_segment = False
        elif uid in self._prompt_tokens:
            whole = self._prompt_tokens[uid]
            response.progress = (max(0, whole - (total - done)), whole)
        return response


def _shrink(prompt_cache: list[Any]) -> None:
    """Give back the blocks of a sequence that are reserved and not written."""
    cache = first_paged(prompt_cache)
    for sequence in () if cache is None else cache.sequences:
        sequence.shrink()


def attach(generator: BatchGenerator, factory: PagedFactory) -> Preemption:
    """Let a generator's steps preempt sequences, from now on, and survive shortages of memory."""
    preemption: Preemption | None = getattr(generator, _ATTACHED, None)
    if preemption is None:
        preemption = Preemption(generator, factory)
        # Of this generator only, which keeps it if the factory is uninstalled before it ends.
        set_next(generator, preemption.shortages.step)
        setattr(generator, _ATTACHED, preemption)
    return preemption
