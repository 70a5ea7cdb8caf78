"""Steps of mlx-lm's BatchGenerator that compute the prompts whose turn it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from time import perf_counter
from typing import Any

from paged_kv.admission.scheduler import HEAD, Prompt, PromptTurns
from paged_kv.integrations.batching.prompt_segments import Tokens, whole_pages
from paged_kv.integrations.batching.prompt_sharing import PromptSharing
from paged_kv.integrations.batching.rows import (
    Requests,
    Responses,
    Waiting,
    WaitingQueue,
    hidden_prompts,
    step_with,
)
from paged_kv.integrations.batching.short_memory import Shortages
from paged_kv.integrations.mlx_lm_internals import GeneratorParts
from paged_kv.prefix.keeping import Rates
from paged_kv.ranks import Ranks

# With fewer tokens of prompts, a step's time is that of the tokens that others generate in it.
_FEW_TOKENS = 16
# So many steps without prompts say how long the next one takes.
_STEPS = 15


class PromptChoice:
    """The prompts that each step of one BatchGenerator computes.

    Args:
        generator: BatchGenerator.
        queue: its sequences that wait.
        requests: of its sequences.
        sharing: knows how much of a waiting prompt is cached.
        answering: waiting sequences that were preempted while they answered.
        pause: lets a sequence whose prompt is being computed wait with its pages.
        rates: the speeds that were measured.
        ranks: compute the same steps.
        in_pages: whether steps of prompts end where pages do.

    Attributes:
        turns: say which prompts a step computes; None for `prefill_step_size` tokens of each.
    """

    def __init__(
        self,
        generator: Any,
        queue: WaitingQueue,
        requests: Requests,
        sharing: PromptSharing,
        answering: Collection[int],
        pause: Callable[[int], None],
        rates: Rates,
        ranks: Ranks,
        *,
        in_pages: bool,
    ) -> None:
        self._generator = generator
        self._in_pages = in_pages
        self._parts = GeneratorParts(generator)
        self._queue, self._requests, self._sharing = queue, requests, sharing
        self._answering, self._pause = answering, pause
        self._rates, self._ranks = rates, ranks
        self.turns: PromptTurns | None = None
        self._waiting: dict[int, Prompt] = {}
        # Seconds of the last steps without prompts.
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._had_prompts = False
        self._ended: float | None = None  # when the last step ended, if answers go on
        self._last_s = 0.0

    def begin_step(self) -> list[int]:
        """The sequences that wait, in the order in which they may begin."""
        line = {each.uid: each for each in self._queue}
        if self.turns is None:
            return [*line]
        answers, prompts = len(self._parts.generating), len(line) + len(self._parts.reading)
        if prompts:
            token_s = self._rates.computing.seconds_for(1) or 0.0
            speeds = self._step_s, token_s, self.turns.owed_s
            self.turns.begin_step(answers, prompts, *self._ranks.broadcast("speeds", speeds))
            self._generator.prefill_step_size = self._within_memory(self.turns.part)
        known = self._waiting
        self._waiting = {uid: known.get(uid) or self._prompt_of(each) for uid, each in line.items()}
        # What is cached of a prompt changes: it is looked up anew for those that may begin.
        for uid in self._in_order()[:HEAD]:
            self._waiting[uid] = self._prompt_of(line[uid])
        return self._in_order()

    def is_turn(self, uid: int, running: list[int]) -> bool:
        """Whether a waiting sequence may begin in a step beside these."""
        if self.turns is None:
            return True
        beginning = [self._waiting[each] for each in (*running, uid) if each in self._waiting]
        # One that was preempted in this step is not among them.
        return uid in self.turns.chosen([*self._reading(), *beginning])

    def step(self, begun: set[int]) -> Responses:
        """BatchGenerator's step, in which these of the waiting sequences begin."""
        if self.turns is None:
            return self._timed(begun)
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

    def _in_order(self) -> list[int]:
        assert self.turns is not None
        return [each.number for each in sorted(self._waiting.values(), key=self.turns.sort_key)]

    def _prompt_of(self, waiting: Waiting) -> Prompt:
        total = len(waiting.tokens) + sum(map(len, waiting.segments))
        computed = max(len(waiting.tokens), self._sharing.cached(waiting.uid)[0])
        computed = min(computed, total - 1)
        return self._prompt(waiting.uid, computed, total - computed)

    def _reading(self) -> list[Prompt]:
        """The prompts that are being computed."""
        batch = self._parts.reading
        rows = zip(batch.uids, batch.tokens, self._parts.processing, strict=True)
        return [
            self._prompt(uid, len(tokens), self._left(segments))
            for uid, tokens, (segments, *_) in rows
        ]

    def _left(self, segments: list[Tokens]) -> int:
        """The tokens that are left of a prompt. A reproducible answer that is computed again takes
        one in each step, so it costs no more than an answer that goes on, and holds up nobody."""
        is_answer = self._in_pages and len(segments[0]) == 1
        return 1 if is_answer else sum(map(len, segments))

    def _prompt(self, uid: int, computed: int, left: int) -> Prompt:
        priority, arrival = self._requests.order(uid)
        rank = priority, uid not in self._answering
        return Prompt(uid, rank, arrival, computed, left)

    def _within_memory(self, tokens: int) -> int:
        """So many tokens of a step, or those that there was memory for. Steps of reproducible
        sequences end where pages do."""
        if self._in_pages:
            tokens = whole_pages(tokens)
        shortages = Shortages.of(self._generator)
        longest = None if shortages is None else shortages.longest
        return tokens if longest is None else min(tokens, longest)

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
