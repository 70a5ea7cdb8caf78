"""The prompts of one BatchGenerator: which of them a step computes, and what they share.

Prompts that begin alike compute their beginning once. The one that begins first is cut where others
part from it, also where they come later, and what it has computed is cached there. Those that wait
for that begin then, with what is cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from functools import partial
from itertools import accumulate, chain, islice
from math import inf
from time import perf_counter
from typing import Any, Protocol

from paged_kv.admission.scheduler import HEAD, Prompt, PromptTurns
from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.integrations.batching.prompt_segments import (
    WORTH_SHARING,
    Tokens,
    cut_at,
    joined,
    shared_beyond,
    whole_pages,
)
from paged_kv.integrations.batching.rows import (
    Requests,
    Waiting,
    WaitingQueue,
    hidden_prompts,
    step_with,
)
from paged_kv.integrations.batching.short_memory import Responses, Shortages
from paged_kv.integrations.mlx_lm_internals import GeneratorParts
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.page_pool import PagePool
from paged_kv.prefix.keeping import inner_salt
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.ranks import Ranks
from paged_kv.trace import RequestRecorder

# With fewer tokens of prompts, a step's time is that of the tokens that others generate in it.
_FEW_TOKENS = 16
# So many steps without prompts say how long the next one takes.
_STEPS = 15


class PagedFactory(Protocol):
    """Makes, finds and keeps the prompt caches of one model."""

    pool: PagePool
    prefixes: PrefixCache
    ranks: Ranks
    recorder: RequestRecorder | None
    decode_share: float | None

    def make_cache(self, max_kv_size: int | None = None) -> list[Any]: ...

    def can_admit(self, tokens: int) -> bool: ...

    def peek(self, tokens: Tokens, *, salt: Hashable = None) -> tuple[int, int]: ...

    def fetch_cache(self, tokens: Tokens, *, salt: Hashable = None) -> tuple[list[Any], int]: ...

    def parting(self, tokens: Tokens, *, salt: Hashable = None) -> int: ...

    def insert_cache(
        self,
        tokens: Tokens,
        prompt_cache: list[Any],
        *,
        salt: Hashable = None,
        session: Hashable = None,
    ) -> int: ...


class Prompts:
    """The prompts of one BatchGenerator that wait or are being computed.

    Args:
        generator: BatchGenerator.
        factory: finds and keeps the prompt caches of its model. With a `decode_share` prompts take
            turns; else a step computes `prefill_step_size` tokens of each.
        queue: its sequences that wait.
        requests: of its sequences.
        answering: waiting sequences that were preempted while they answered.
        pause: lets a sequence whose prompt is being computed wait with its pages.
        shortages: of the generator.

    Attributes:
        new: waiting sequences whose prompts were not looked up yet.
        turns: say which prompts a step computes; None without turns.
    """

    def __init__(
        self,
        generator: Any,
        factory: PagedFactory,
        queue: WaitingQueue,
        requests: Requests,
        answering: Collection[int],
        pause: Callable[[int], None],
        shortages: Shortages,
    ) -> None:
        self._generator = generator
        self._parts = GeneratorParts(generator)
        self._factory, self._queue, self._requests = factory, queue, requests
        self._answering, self._pause, self._shortages = answering, pause, shortages
        self._rates = factory.prefixes.rates
        self._in_pages = factory.pool.is_reproducible  # steps of prompts end where pages do
        if self._in_pages:
            generator.prefill_step_size = whole_pages(generator.prefill_step_size)
        self.new: set[int] = set()
        # Of prompts that wait. To look all of them up in each step would take long.
        self._cached: dict[int, tuple[int, int]] = {}
        self._known_state = 0, 0
        # Where prompts that are being computed will be cached for others, in tokens.
        self._ends: dict[int, set[int]] = {}
        self.turns: PromptTurns | None = None
        if factory.decode_share is not None:
            most = generator.prefill_step_size, generator.prefill_batch_size
            self.turns = PromptTurns(*most, PAGE_SIZE, factory.decode_share)
        self._waiting: dict[int, Prompt] = {}
        # Seconds of the last steps without prompts.
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._had_prompts = False
        self._ended: float | None = None  # when the last step ended, if answers go on
        self._last_s = 0.0

    def forget_all_but(self, uids: set[int]) -> None:
        self.new &= uids
        self._ends = {uid: ends for uid, ends in self._ends.items() if uid in uids}

    def begin_step(self) -> list[int]:
        """The sequences that wait, in the order in which they may begin."""
        state = len(self._factory.pool.index), self._factory.pool.bytes_active
        if state != self._known_state:
            self._known_state = state
            self._cached.clear()
        line = {each.uid: each for each in self._queue}
        if self.turns is None:
            return [*line]
        answers, prompts = len(self._parts.generating), len(line) + len(self._parts.reading)
        if prompts:
            token_s = self._rates.computing.seconds_for(1) or 0.0
            speeds = self._step_s, token_s, self.turns.owed_s
            speeds = self._factory.ranks.broadcast("speeds", speeds)
            self.turns.begin_step(answers, prompts, *speeds)
            self._generator.prefill_step_size = self._within_memory(self.turns.part)
        known = self._waiting
        self._waiting = {uid: known.get(uid) or self._prompt_of(each) for uid, each in line.items()}
        # What is cached of a prompt changes: it is looked up anew for those that may begin.
        for uid in self._in_order(self.turns)[:HEAD]:
            self._waiting[uid] = self._prompt_of(line[uid])
        return self._in_order(self.turns)

    def is_turn(self, uid: int, running: list[int]) -> bool:
        """Whether a waiting sequence may begin in a step beside these."""
        if self.turns is None:
            return True
        beginning = [self._waiting[each] for each in (*running, uid) if each in self._waiting]
        # One that was preempted in this step is not among them.
        return uid in self.turns.chosen([*self._reading(), *beginning])

    def step(self, begun: set[int]) -> Responses:
        """BatchGenerator's step, in which these of the waiting sequences begin. What it computes of
        prompts is kept where others may resume."""
        prompts, generated = self._timed(begun) if self.turns is None else self._in_turns(begun)
        for response in prompts:
            self._keep(response)
        return prompts, generated

    def cached(self, uid: int) -> tuple[int, int]:
        """How many tokens of a waiting prompt are cached, and how many of these are in use."""
        if uid not in self._cached:
            tokens = self._queue[uid].all_tokens
            self._cached[uid] = self._factory.peek(tokens, salt=self._requests.of(uid).salt)
        return self._cached[uid]

    def cut(self, waiting: Waiting) -> Waiting:
        """A sequence that begins, whose prompt is also cut where other prompts are known to part
        from it: what it shares with them is cached there."""
        uid, tokens, cached = waiting.uid, waiting.all_tokens, len(waiting.tokens)
        salt = self._requests.of(uid).salt
        others = (
            each.all_tokens
            for each in self._queue
            if each.uid in self.new - {uid} and self._is_of(each.uid, salt)
        )
        shared = max([common_prefix(tokens, other) for other in others], default=0)
        goals = {shared, self._factory.parting(tokens, salt=salt)}
        ends = {
            end
            for each in goals
            if (end := self._place(min(each, len(tokens) - 1))) >= cached + WORTH_SHARING
        }
        segments = cut_at(waiting.segments, [end - cached for end in ends])
        if self._requests.of(uid).keep is not None:
            ends.update(self._place(cached + end) for end in accumulate(map(len, segments[:-1])))
        self._ends[uid] = ends
        return waiting._replace(segments=segments)

    def awaits(self, number: int, running: list[int]) -> bool:
        """Whether a prompt that runs is about to have computed and cached what a waiting sequence
        begins with, beyond what is cached now.

        A prompt that waits for that is not computed twice, and begins at most one step later than
        it would have been computed.
        """
        tokens, salt = self._queue[number].all_tokens, self._requests.of(number).salt
        cached, _ = self.cached(number)
        step = self._generator.prefill_step_size
        for uid, parts, computed in self._begun(running):
            # Before all of a long prompt is joined.
            begins_alike = tokens[:WORTH_SHARING] == [*islice(chain(*parts), WORTH_SHARING)]
            if not begins_alike or not self._is_of(uid, salt):
                continue
            missing = shared_beyond(cached, tokens, joined(parts)[:-1])
            if missing and self._end_near(uid, computed, cached + missing) <= missing + step:
                return True
        return False

    def _end_near(self, uid: int, computed: int, goal: int) -> float:
        """How many tokens of a prompt that runs must be computed until its first `goal` tokens are
        cached, but for a few. A prompt that is being computed is cut there; infinite if they are
        computed already, or if it begins in this step."""
        goal = self._place(goal)
        ends = self._ends.setdefault(uid, set())
        near = [end for end in ends if computed < end <= goal and goal - end < WORTH_SHARING]
        if near:
            return max(near) - computed
        reading = self._parts.reading.uids
        if computed >= goal or uid not in reading:
            return inf
        segments = self._parts.processing[reading.index(uid)][0]
        segments[:] = cut_at(segments, [goal - computed])
        ends.add(goal)
        return goal - computed

    def _place(self, tokens: int) -> int:
        """Where a prompt may be cut among its first tokens: of a reproducible one only where a page
        ends."""
        return tokens // PAGE_SIZE * PAGE_SIZE if self._in_pages else tokens

    def _keep(self, response: Any) -> None:
        """Keep what is computed of a prompt where one of its segments ends."""
        ends = self._ends.get(response.uid)
        if not ends or response.end_of_prompt or not response.end_of_segment:
            return
        cache, tokens = self._generator.extract_cache([response.uid])[response.uid]
        # Of a prompt of two tokens there are no states yet.
        if len(tokens) in ends and len(tokens) > 1:
            request = self._requests.of(response.uid)
            salt, session = request.salt, request.session
            insert = partial(self._factory.insert_cache, salt=salt, session=session)
            (request.keep or insert)(tokens[:], cache)

    def _begun(self, running: list[int]) -> Iterator[tuple[int, list[Tokens], int]]:
        """The prompts that are being computed: uid, tokens in parts, and how many are computed."""
        for uid, tokens, segments in self._reading_rows():
            yield uid, [tokens, *segments], len(tokens)
        for each in self._queue:
            if each.uid in running:
                yield each.uid, [each.tokens, *each.segments], len(each.tokens)

    def _reading_rows(self) -> Iterator[tuple[int, Tokens, list[Tokens]]]:
        """The rows of the batch whose prompts are being computed: uid, tokens that are computed,
        and segments that are left."""
        batch = self._parts.reading
        rows = zip(batch.uids, batch.tokens, self._parts.processing, strict=True)
        return ((uid, tokens, segments) for uid, tokens, (segments, *_) in rows)

    def _is_of(self, uid: int, salt: Hashable) -> bool:
        """Whether a sequence shares prompts with those of a salt."""
        return inner_salt(self._requests.of(uid).salt) == inner_salt(salt)

    def _in_turns(self, begun: set[int]) -> Responses:
        assert self.turns is not None
        reading = self._reading()
        prompts = [*reading, *(self._waiting.pop(uid) for uid in begun)]
        chosen = self.turns.chosen(prompts)
        everybody = [*prompts, *self._waiting.values()]
        self._generator.prefill_step_size = self._within_memory(max([1, *chosen.values()]))
        late = [each.number for each in reading if each.number not in chosen]
        if reading and len(late) == len(reading):
            # Nothing of these changes, so they stay a batch.
            with hidden_prompts(self._generator):
                responses = self._timed(begun)
        else:
            for uid in late:
                self._pause(uid)
            responses = self._timed(begun)
        self.turns.end_step(self._last_s, everybody, chosen)
        return responses

    @property
    def _step_s(self) -> float:
        """Seconds of a step without prompts; 0 if none was taken."""
        # Steps soon behind a prompt are slower than those that answers would take without it.
        return sorted(self._seconds)[len(self._seconds) // 4] if self._seconds else 0.0

    def _in_order(self, turns: PromptTurns) -> list[int]:
        return [each.number for each in sorted(self._waiting.values(), key=turns.sort_key)]

    def _prompt_of(self, waiting: Waiting) -> Prompt:
        total = len(waiting.tokens) + sum(map(len, waiting.segments))
        computed = max(len(waiting.tokens), self.cached(waiting.uid)[0])
        computed = min(computed, total - 1)
        return self._prompt(waiting.uid, computed, total - computed)

    def _reading(self) -> list[Prompt]:
        """The prompts that are being computed. A reproducible answer that is computed again takes
        one token in each step, so it costs no more than an answer that goes on, and holds up
        nobody."""
        return [
            self._prompt(
                uid,
                len(tokens),
                1 if self._in_pages and len(segments[0]) == 1 else sum(map(len, segments)),
            )
            for uid, tokens, segments in self._reading_rows()
        ]

    def _prompt(self, uid: int, computed: int, left: int) -> Prompt:
        priority, arrival = self._requests.order(uid)
        rank = priority, uid not in self._answering
        return Prompt(uid, rank, arrival, computed, left)

    def _within_memory(self, tokens: int) -> int:
        """So many tokens of a step, or those that there was memory for. Steps of reproducible
        sequences end where pages do."""
        if self._in_pages:
            tokens = whole_pages(tokens)
        return min(tokens, self._shortages.longest or tokens)

    def _timed(self, begun: set[int]) -> Responses:
        """As `step_with`; records how long it takes."""
        computed, began = self._parts.prompt_tokens, perf_counter()
        step_s = self._step_s if len(self._parts.generating) else 0.0
        responses = step_with(self._generator, begun)
        ended, computed = perf_counter(), self._parts.prompt_tokens - computed
        # To answers that wait for this step, what came before it is a part of it.
        self._last_s = ended - (self._ended or began)
        if computed > _FEW_TOKENS:
            self._rates.computing.record(computed, max(0.0, ended - began - step_s))
        elif not self._had_prompts:
            self._rates.decoding.record(1, ended - began)
            self._seconds.append(self._last_s)
        # Behind a prompt the tokens of the next step are computed already.
        self._had_prompts = computed > _FEW_TOKENS
        self._ended = ended if len(self._parts.generating) else None
        return responses
