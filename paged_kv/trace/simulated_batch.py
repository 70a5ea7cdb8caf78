"""A batch without a model: sequences that grow in a pool of integers, run by the `Scheduler`."""

from __future__ import annotations

from dataclasses import dataclass

from paged_kv.admission.growth import Growth, has_room
from paged_kv.admission.pool_size import PoolSize
from paged_kv.admission.scheduler import Scheduler


@dataclass
class SimulatedSequence:
    """A sequence.

    Attributes:
        prompt: tokens to compute before it generates.
        answer: tokens that it generates before it ends.
        max_tokens: the most tokens that it may generate; at least `answer`.
        held: tokens that it holds.
        cached: tokens that are still cached while it waits.
        lost: tokens that it held when it was preempted.
        generated: tokens so far.
    """

    prompt: int
    answer: int
    max_tokens: int
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
        return self._bytes([self.sequences[number].held for number in self.running])

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
        after = [self.sequences[number].next_held(self.chunk) for number in running]
        if self._bytes(after) > self.pool.budget:
            return False
        self._reserved = list(running)
        return True

    def preempt(self, number: int) -> None:
        sequence = self.sequences[number]
        sequence.cached = sequence.lost = sequence.held
        sequence.held = 0

    def has_room(self, number: int, running: list[int]) -> bool:
        sequences = [self.sequences[each] for each in running]
        new_bytes = self.sequences[number].growth.bytes_to_begin(self.pool)
        in_use = self._bytes([each.held for each in sequences])
        return has_room(new_bytes, [each.growth for each in sequences], self.pool, in_use)

    def begin(self, number: int) -> bool:
        sequence = self.sequences[number]
        sequence.held = sequence.cached
        if not self.reserve([*self._reserved, number]):
            sequence.held = 0
            return False
        self.recomputed += sequence.lost - sequence.held
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
        free = self.pool.promisable - self._bytes(
            [self.sequences[number].next_held(self.chunk) for number in self.running]
        )
        for number in self.waiting:
            sequence = self.sequences[number]
            while sequence.cached and self.pool.bytes_for(sequence.cached) > free:
                sequence.cached = (sequence.cached - 1) // self.pool.page_size * self.pool.page_size
            free -= self.pool.bytes_for(sequence.cached)

    def _bytes(self, lengths: list[int]) -> int:
        return sum(self.pool.bytes_for(length) for length in lengths)


class ReservingBatch(SimulatedBatch):
    """Runs sequences that have all the memory that they may need until they end."""

    def has_room(self, number: int, running: list[int]) -> bool:
        most = [self.sequences[each].growth.most for each in [*running, number]]
        return self._bytes(most) <= self.pool.promisable
