"""Replays the requests of a trace with an admission policy: how many would have run at once.

This replays arrivals and lengths, not blocks. Requests that run share the full pages that their
prompts begin with; nothing else is cached. Pages are not requantised. A step takes as long as the
recorded requests took for a token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import mean

from paged_kv.admission.growth import Growth, has_room
from paged_kv.admission.pool_size import PoolSize
from paged_kv.admission.scheduler import Scheduler
from paged_kv.trace.requests import TracedLoad, TracedRequest
from paged_kv.trace.shared_prompts import Runs, common_pages, pages_saved


@dataclass
class SimulatedSequence:
    """A sequence.

    Attributes:
        prompt: tokens to compute before it generates.
        answer: tokens that it generates before it ends.
        max_tokens: the most tokens that it may generate; at least `answer`.
        runs: the full pages of its prompt, which it shares with others.
        held: tokens that it holds.
        cached: tokens that are still cached while it waits.
        lost: tokens that it held when it was preempted.
        generated: tokens so far.
    """

    prompt: int
    answer: int
    max_tokens: int
    runs: Runs = ()
    held: int = 0
    cached: int = 0
    lost: int = 0
    generated: int = 0

    @property
    def target(self) -> int:
        """Tokens to hold before it generates the next one."""
        return self.prompt + self.generated

    @property
    def growth(self) -> Growth:
        """Its tokens."""
        return Growth(self.held, self.target, self.prompt + self.max_tokens)

    def next_held(self, chunk: int) -> int:
        """Tokens that it holds after a step that computes at most `chunk` tokens of a prompt."""
        return min(self.held + chunk, self.target) if self.held < self.target else self.held + 1


class SimulatedBatch:
    """Runs sequences with optimistic admission. It is the scheduler's `Runner`.

    Args:
        pool: the memory.
        places: the most sequences that run at once.
        chunk: the most tokens of a prompt that a step computes.

    Attributes:
        sequences: all that have arrived, by number.
        running, waiting: their numbers.
        recomputed: tokens that were computed again.
    """

    def __init__(self, pool: PoolSize, places: int, chunk: int) -> None:
        self.pool = pool
        self.places = places
        self.chunk = chunk
        self.sequences: list[SimulatedSequence] = []
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.recomputed = 0
        self.scheduler = Scheduler(self)
        self._reserved: list[int] = []

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the blocks that running sequences hold."""
        return self._bytes_held(self.running)

    def arrive(self, sequence: SimulatedSequence) -> bool:
        """Queue a sequence; false if it could not end even alone."""
        if self.pool.bytes_for(sequence.prompt + sequence.max_tokens) > self.pool.promisable:
            return False
        self.waiting.append(len(self.sequences))
        self.sequences.append(sequence)
        return True

    def step(self) -> None:
        """Choose the sequences of the next step, and compute it."""
        self._reserved = []
        places = self.places - len(self.running)
        fits = self.scheduler.schedule(self.running, self.waiting, places)
        assert fits, "a sequence that has arrived fits alone"
        self._evict()
        for number in list(self.running):
            self._compute(number)

    def reserve(self, running: list[int]) -> bool:
        if self._bytes_after(running) > self.pool.budget:
            return False
        self._reserved = list(running)
        return True

    def preempt(self, number: int) -> None:
        sequence = self.sequences[number]
        sequence.cached = sequence.lost = sequence.held
        sequence.held = 0

    def has_room(self, number: int, running: list[int]) -> bool:
        sequences = [self.sequences[each] for each in running]
        # As the server counts: the memory that its full pages take is that of the others.
        new_bytes = self.sequences[number].growth.bytes_to_begin(self.pool)
        new_bytes -= self.pool.shared_bytes(self._shared_tokens(number, running))
        growths = [each.growth for each in sequences]
        return has_room(new_bytes, growths, self.pool, self._bytes_held(running))

    def begin(self, number: int) -> bool:
        sequence = self.sequences[number]
        sequence.held = max(sequence.cached, self._shared_tokens(number, self._reserved))
        if not self.reserve([*self._reserved, number]):
            sequence.held = 0
            return False
        self.recomputed += max(0, sequence.lost - sequence.held)
        sequence.lost = sequence.cached = 0
        return True

    def _compute(self, number: int) -> None:
        sequence = self.sequences[number]
        generates = sequence.held == sequence.target
        sequence.held = sequence.next_held(self.chunk)
        if generates:
            sequence.generated += 1
            self.scheduler.note_token(number)
        if sequence.generated >= sequence.answer and sequence.held >= sequence.prompt:
            self.running.remove(number)
            sequence.held = 0

    def _evict(self) -> None:
        """Evict what waiting sequences have cached, where the running ones need it."""
        free = self.pool.promisable - self._bytes_after(self.running)
        for number in self.waiting:
            sequence = self.sequences[number]
            while sequence.cached and self.pool.bytes_for(sequence.cached) > free:
                sequence.cached = (sequence.cached - 1) // self.pool.page_size * self.pool.page_size
            free -= self.pool.bytes_for(sequence.cached)

    def _shared_tokens(self, number: int, running: list[int]) -> int:
        """Tokens of the first full pages of a sequence's prompt that others hold."""
        own = self.sequences[number].runs
        others = [self.sequences[each] for each in running if each != number]
        pages = [
            min(common_pages(own, each.runs), each.held // self.pool.page_size) for each in others
        ]
        return max(pages, default=0) * self.pool.page_size

    def _bytes_held(self, numbers: list[int]) -> int:
        return self._bytes([(each, each.held) for each in map(self.sequences.__getitem__, numbers)])

    def _bytes_after(self, numbers: list[int]) -> int:
        """What sequences take after a step."""
        sequences = [self.sequences[number] for number in numbers]
        return self._bytes([(each, each.next_held(self.chunk)) for each in sequences])

    def _bytes(self, held: list[tuple[SimulatedSequence, int]]) -> int:
        """What sequences take that hold so many tokens."""
        page = self.pool.page_size
        saved = pages_saved((sequence.runs, tokens // page) for sequence, tokens in held)
        whole = sum(self.pool.bytes_for(tokens) for _, tokens in held)
        return whole - self.pool.shared_bytes(saved * page)


class ReservingBatch(SimulatedBatch):
    """Runs sequences that have all the memory that they may need until they end."""

    def has_room(self, number: int, running: list[int]) -> bool:
        most = [self.sequences[each].growth.most for each in [*running, number]]
        return sum(map(self.pool.bytes_for, most)) <= self.pool.promisable


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
    runs = [_Run(load, pool, admission, max_tokens, max_bytes) for pool in load.pools]
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
