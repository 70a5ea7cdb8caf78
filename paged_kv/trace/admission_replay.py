"""Replays the requests of a trace with an admission policy: how many would have run at once.

This replays arrivals and lengths, not blocks. Requests that run share the full pages that their
prompts begin with; nothing else is cached. Pages are not requantised. A step takes as long as the
recorded requests took for a token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import mean

from paged_kv.trace.requests import TracedLoad, TracedRequest
from paged_kv.trace.simulated_batch import (
    ReservingBatch,
    SimulatedBatch,
    SimulatedSequence,
)

# mlx-lm's server computes so many tokens of a prompt in a step, and so many sequences at once.
CHUNK = 2048
PLACES = 32

BATCHES = {"optimistic": SimulatedBatch, "reserve": ReservingBatch}


@dataclass(frozen=True)
class AdmissionOutcome:
    """The result of a replay, of all pools.

    Attributes:
        requests: found in the trace.
        impossible: those of them that do not fit even alone.
        running_mean: sequences that run, the mean over all steps in which any does.
        running_most: the most sequences that run in a step.
        steps: steps in which any sequence runs.
        preemptions: how often a sequence was preempted.
        tokens_recomputed: tokens that were computed again after a preemption.
    """

    requests: int
    impossible: int
    running_mean: float
    running_most: int
    steps: int
    preemptions: int
    tokens_recomputed: int


def replay_admission(
    load: TracedLoad, admission: str, max_tokens: int | None = None, max_bytes: int | None = None
) -> AdmissionOutcome:
    """Replay a load. `max_tokens` is what each request allows, or its own answer if that is longer;
    `max_bytes` is the budget of each pool. None means what was recorded.

    O(steps * running sequences).
    """
    runs = [
        _Run(load, pool, admission, max_tokens, max_bytes)
        for pool in sorted({request.pool for request in load.requests})
    ]
    running = [count for run in runs for count in run.running]
    return AdmissionOutcome(
        requests=len(load.requests),
        impossible=sum(run.impossible for run in runs),
        running_mean=mean(running) if running else 0.0,
        running_most=max(running, default=0),
        steps=len(running),
        preemptions=sum(run.batch.scheduler.preemptions for run in runs),
        tokens_recomputed=sum(run.batch.recomputed for run in runs),
    )


class _Run:
    """The replay of one pool."""

    def __init__(
        self,
        load: TracedLoad,
        pool: int,
        admission: str,
        max_tokens: int | None,
        max_bytes: int | None,
    ) -> None:
        self.batch = BATCHES[admission](load.pool_size(pool, max_bytes), PLACES, CHUNK)
        self.impossible = 0
        self.running: list[int] = []
        self._max_tokens = max_tokens
        arriving = deque(each for each in load.requests if each.pool == pool)
        now, step_ms = 0.0, load.step_ms(CHUNK)
        while arriving or self.batch.running or self.batch.waiting:
            while arriving and arriving[0].arrives <= now:
                self._arrive(arriving.popleft())
            if self.batch.running or self.batch.waiting:
                self._step()
                now += step_ms
            elif arriving:
                # Requests that came together begin together.
                now = arriving[0].arrives + step_ms

    def _arrive(self, request: TracedRequest) -> None:
        most = max(self._max_tokens or request.most, request.answer)
        sequence = SimulatedSequence(request.prompt, request.answer, most, request.runs)
        self.impossible += not self.batch.arrive(sequence)

    def _step(self) -> None:
        before = {*self.batch.running, *self.batch.waiting}
        self.batch.step()
        ended = before - {*self.batch.running, *self.batch.waiting}
        self.running.append(len(self.batch.running) + len(ended))
