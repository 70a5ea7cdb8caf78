"""Serves the requests of a trace as `paged-kv server` does, with a model that computes nothing.

The pool, the prefix cache, the admission, the scheduler and mlx-lm's BatchGenerator are those that
serve. Time is that of a clock which the steps move on: each takes as long as the tokens of prompts
that it computes, and at least as long as a step of decode. A request generates as many tokens as it
did, and prompts that continue an answer find it cached.

Not replayed are the states of recurrent layers, pages on disk, drafts and priorities.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from tqdm import tqdm

from paged_kv.admission.admission import Admission, RequestImpossible
from paged_kv.admission.demand import Demand
from paged_kv.admission.policies import Optimistic
from paged_kv.allocator.prefixes.duel import BETTER_OF_TWO
from paged_kv.allocator.prefixes.eviction import EvictionPolicy
from paged_kv.integrations.batching.pool_memory import pool_size
from paged_kv.integrations.batching.preemption import attach
from paged_kv.integrations.batching.shared_prefill import shared_beyond
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.replay.idle_model import IdleBackend, IdleModel
from paged_kv.trace.requests import Trace, TracedRequest

# As in `paged-kv server`: requests that run at once, prompts that are computed at once, and tokens
# of prompts in a step.
PLACES, PROMPTS_AT_ONCE, STEP_TOKENS = 32, 8, 2048


@dataclass
class Outcome:
    """The result of a replay.

    Attributes:
        served: requests that have ended.
        refused: requests that do not fit even alone.
        prompt_tokens, cached_tokens: of prompts, and how many of them were found cached.
        preemptions: how often a request was preempted.
        peak_bytes: the most that the pages of requests took after a step.
        mean_wait_s, longest_wait_s: from the arrival of a request until it began.
        seconds: of the replay's clock.
    """

    served: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    peak_bytes: int = 0
    mean_wait_s: float = 0.0
    longest_wait_s: float = 0.0
    seconds: float = 0.0


def replay(
    trace: Trace,
    max_bytes: int,
    page_format: str,
    eviction_policy: EvictionPolicy = BETTER_OF_TWO,
) -> Outcome:
    """Serve the requests of a trace with a factory that has these arguments.

    Raises:
        PoolExhausted: the budget does not hold a page of every layer.
        ValueError: the page format cannot hold the layers of the trace.
    """
    model = IdleModel(trace.layers)
    factory = PagedCacheFactory(
        model,
        max_bytes=max_bytes,
        page_format=page_format,
        eviction_policy=eviction_policy,
        backend=IdleBackend(),
        compile=False,
    )
    with closing(factory):
        return _Replay(trace, model, factory).run()


@dataclass(eq=False)
class _Running:
    """A request that runs, and how many tokens of its prompt are left to compute."""

    request: TracedRequest
    prompt: list[int]
    left: int


class _Replay:
    """One run. The clock counts milliseconds."""

    def __init__(self, trace: Trace, model: IdleModel, factory: PagedCacheFactory) -> None:
        self._trace, self._factory, self._pool = trace, factory, factory.pool
        self._outcome = Outcome()
        self._now = 0.0
        self._arriving = deque(trace.requests)
        self._running: dict[int, _Running] = {}
        self._generator: Any = BatchGenerator(
            model, completion_batch_size=PLACES, prefill_batch_size=PROMPTS_AT_ONCE
        )
        preemption = attach(self._generator, factory)
        assert preemption is not None, "the model has pages"
        size = pool_size(self._pool)
        self._admission: Admission[TracedRequest] = Admission(
            self._demand,
            patience_s=math.inf,
            places=PLACES,
            pools=[size],
            policy=Optimistic(lambda demand: preemption.can_begin(demand.bytes_to_begin(size))),
        )

    def run(self) -> Outcome:
        """Serve all requests."""
        outcome, total = self._outcome, len(self._arriving)
        with tqdm(total=total, desc="replay", leave=False, disable=None) as bar:
            while self._arriving or not self._admission.is_idle:
                if self._admission.is_idle:
                    self._now = max(self._now, self._arriving[0].arrives)
                while self._arriving and self._arriving[0].arrives <= self._now:
                    self._arrive(self._arriving.popleft())
                while (request := self._admission.next()) is not None:
                    self._begin(request)
                if self._running:
                    self._step()
                bar.update(outcome.served + outcome.refused - bar.n)
        outcome.preemptions = self._pool.counts.preemptions
        outcome.mean_wait_s /= max(1, outcome.served)
        outcome.seconds = self._now / 1000
        return outcome

    def _demand(self, request: TracedRequest) -> Demand:
        prompt = request.prompt
        cached, in_use = self._factory.peek(prompt)
        awaits = any(
            other.left <= missing + STEP_TOKENS
            for other in self._running.values()
            if other.left and (missing := shared_beyond(cached, prompt, other.prompt))
        )
        answer = request.answer_length
        return Demand(len(prompt), answer, shared_tokens=in_use, awaits_prefix=awaits)

    def _arrive(self, request: TracedRequest) -> None:
        try:
            self._admission.arrive(request)
        except RequestImpossible:
            self._outcome.refused += 1

    def _begin(self, request: TracedRequest) -> None:
        prompt, outcome = request.prompt, self._outcome
        cache, cached = self._factory.fetch_cache(prompt)
        positions = count(len(prompt))
        (uid,) = self._generator.insert_segments(
            segments=[[prompt[cached:]]],
            max_tokens=[request.answer_length],
            caches=[cache],
            all_tokens=[prompt[:cached]],
            samplers=[lambda _: mx.array([request.token(next(positions))], mx.uint32)],
        )
        self._running[uid] = _Running(request, prompt, len(prompt) - cached)
        outcome.prompt_tokens += len(prompt)
        outcome.cached_tokens += cached
        wait_s = (self._now - request.arrives) / 1000
        outcome.mean_wait_s += wait_s
        outcome.longest_wait_s = max(outcome.longest_wait_s, wait_s)

    def _step(self) -> None:
        """Compute a token of every answer, and at most `STEP_TOKENS` of prompts."""
        prompts = sum(each.left > 0 for each in self._running.values())
        self._generator.prefill_step_size = STEP_TOKENS // max(1, min(PROMPTS_AT_ONCE, prompts))
        with self._generator.stats() as work:
            read, sampled = self._generator.next()
        for response in read:
            self._note_read(response)
        for response in sampled:
            if response.finish_reason is not None:
                self._factory.insert_cache(response.all_tokens, response.prompt_cache)
                self._admission.leave(self._running.pop(response.uid).request)
                self._outcome.served += 1
        prompt_ms = work.prompt_tokens * self._trace.prompt_ms
        self._now += max(self._trace.decode_ms, prompt_ms)
        active = self._pool.stats().bytes_active
        self._outcome.peak_bytes = max(self._outcome.peak_bytes, active)

    def _note_read(self, response: Any) -> None:
        done, total = response.progress
        self._running[response.uid].left = total - done
        if response.end_of_segment and not response.end_of_prompt:
            cache, tokens = self._generator.extract_cache([response.uid])[response.uid]
            self._factory.insert_cache(tokens, cache)
