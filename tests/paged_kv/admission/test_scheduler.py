"""The scheduler of a batch without a model: integers in, integers out."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.admission.growth import Growth
from paged_kv.admission.pool_size import GroupSize, PoolSize
from paged_kv.admission.scheduler import Scheduler
from paged_kv.trace.admission_replay import ReservingBatch, SimulatedBatch, SimulatedSequence

PAGE = 4
# The longest sequence is computed in 4 steps, the lookahead of these pools.
CHUNK = 10


def pool_of(blocks: int, ring: int | None = None) -> PoolSize:
    """A pool of one group of layers, or of a second one with a window too."""
    groups = [GroupSize(1, lambda tokens: -(-tokens // PAGE))]
    if ring is not None:
        groups.append(GroupSize(1, lambda tokens: min(-(-tokens // PAGE), ring), is_ring=True))
    return PoolSize(blocks, 0, tuple(groups), PAGE, lookahead=PAGE)


Row = SimulatedSequence


class Machine(SimulatedBatch):
    """Checks each decision of the scheduler."""

    def __init__(self, pool: PoolSize, places: int) -> None:
        super().__init__(pool, places, CHUNK)
        self.preempted: list[int] = []
        self.ended: list[int] = []
        # Tokens that a sequence has generated since it returned.
        self.since_return: dict[int, int] = {}

    def preempt(self, number: int) -> None:
        assert number != min(self.running), "the earliest sequence was preempted"
        assert self.since_return.pop(number, 1), "preempted again before it generated a token"
        self.preempted.append(number)
        super().preempt(number)

    def begin(self, number: int) -> bool:
        has_begun = super().begin(number)
        if has_begun and number in self.preempted:
            self.since_return[number] = 0
        return has_begun

    def step(self) -> None:
        before = sorted([*self.running, *self.waiting])
        generated = [each.generated for each in self.sequences]
        super().step()
        assert self.waiting == sorted(self.waiting)
        self.ended += sorted({*before} - {*self.running, *self.waiting})
        for number in self.since_return:
            self.since_return[number] += self.sequences[number].generated - generated[number]


rows = st.builds(
    lambda prompt, answer, more: Row(prompt, answer, answer + more),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 20),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), rows), min_size=1, max_size=12),
    st.integers(15, 40),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 12),
)
def test_every_sequence_ends_and_the_earliest_is_never_preempted(
    arrivals: list[tuple[int, Row]], blocks: int, ring: int | None, places: int
) -> None:
    """Whatever arrives when. A sequence alone needs at most 60 tokens, which are 15 blocks."""
    machine = Machine(pool_of(blocks + (ring or 0), ring), places)
    times = list(accumulate(after for after, _ in arrivals))
    work = sum(row.prompt + row.answer for _, row in arrivals)
    for step in range(times[-1] + work * len(arrivals)):
        for time, (_, row) in zip(times, arrivals, strict=True):
            if time == step:
                assert machine.arrive(replace(row))
        if machine.running or machine.waiting:
            machine.step()
        assert len(machine.running) <= places
    assert sorted(machine.ended) == list(range(len(arrivals)))
    assert machine.bytes_in_use == 0


class Ranked(Machine):
    """Sequences have priorities: the first in order is never preempted."""

    def __init__(self, pool: PoolSize, places: int, priorities: list[int]) -> None:
        super().__init__(pool, places)
        self.priorities = priorities
        self.scheduler = Scheduler(self, self.order)

    def order(self, number: int) -> tuple[int, int]:
        return self.priorities[number], number

    def arrive(self, sequence: SimulatedSequence) -> bool:
        arrived = super().arrive(sequence)
        self.waiting.sort(key=self.order)
        return arrived

    def preempt(self, number: int) -> None:
        assert number != min(self.running, key=self.order), "the first sequence was preempted"
        spared = [each for each in self.running if self.since_return.get(each, 1) == 0]
        behind = [each for each in self.running if self.order(each) > self.order(number)]
        assert {*behind} <= {*spared}, "one that comes later was not preempted"
        self.preempted.append(number)
        self.since_return.pop(number, None)
        SimulatedBatch.preempt(self, number)

    def step(self) -> None:
        before = {*self.running, *self.waiting}
        generated = [each.generated for each in self.sequences]
        SimulatedBatch.step(self)
        assert self.waiting == sorted(self.waiting, key=self.order)
        self.ended += sorted(before - {*self.running, *self.waiting})
        for number in self.since_return:
            self.since_return[number] += self.sequences[number].generated - generated[number]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), rows, st.integers(-2, 2)), min_size=1, max_size=12),
    st.integers(15, 40),
    st.integers(1, 12),
)
def test_sequences_with_priorities_end_and_the_last_in_their_order_are_preempted(
    arrivals: list[tuple[int, Row, int]], blocks: int, places: int
) -> None:
    machine = Ranked(pool_of(blocks), places, [priority for *_, priority in arrivals])
    times = list(accumulate(after for after, *_ in arrivals))
    work = sum(row.prompt + row.answer for _, row, _ in arrivals)
    for step in range(times[-1] + work * len(arrivals)):
        for time, (_, row, _) in zip(times, arrivals, strict=True):
            if time == step:
                assert machine.arrive(replace(row))
        if machine.running or machine.waiting:
            machine.step()
    assert sorted(machine.ended) == list(range(len(arrivals)))
    assert machine.bytes_in_use == 0


def machine_of(blocks: int, *sequences: Row, places: int = 10) -> Machine:
    machine = Machine(pool_of(blocks), places)
    for row in sequences:
        assert machine.arrive(row)
    return machine


def test_sequences_begin_while_each_can_write_one_more_block() -> None:
    machine = machine_of(8, *[Row(4, 20, 20) for _ in range(5)])
    machine.step()
    # Each takes the block of its prompt and one more.
    assert machine.running == [0, 1, 2, 3]
    assert machine.waiting == [4]


def test_an_answer_that_ends_in_its_block_needs_no_more() -> None:
    machine = machine_of(8, *[Row(3, 1, 1) for _ in range(9)])
    machine.step()
    assert len(machine.running) + len(machine.ended) == 8


def test_the_rest_of_a_prompt_is_kept_free() -> None:
    """The first has computed 10 of 20 tokens. The others take 2 more blocks, and its answer one."""
    machine = machine_of(8, Row(20, 4, 4), Row(4, 4, 4))
    machine.step()
    machine.step()
    assert machine.running == [0, 1]
    machine = machine_of(7, Row(20, 4, 4), Row(4, 4, 4))
    machine.step()
    machine.step()
    assert machine.running == [0]


def test_the_latest_is_preempted_and_returns_before_later_ones() -> None:
    machine = machine_of(6, *[Row(4, 12, 12) for _ in range(3)])
    while not machine.preempted:
        machine.step()
    assert machine.preempted == [2]
    machine.arrive(Row(1, 1, 1))
    machine.step()
    assert (machine.running, machine.waiting) == ([0, 1], [2, 3])
    while machine.running or machine.waiting:
        machine.step()
    assert machine.ended.index(2) < 3 or machine.ended[-1] == 2
    assert machine.scheduler.preemptions == len(machine.preempted)


def test_what_cannot_be_preempted_is_spared() -> None:
    scheduler = machine_of(6, *[Row(4, 12, 12) for _ in range(3)]).scheduler
    assert scheduler._victim([0, 1, 2], {2}) == 1
    assert scheduler._victim([0, 1, 2], {1, 2}) == 0
    assert scheduler._victim([0, 1], {0, 1}) is None
    assert scheduler._victim([0], set()) is None


def test_who_has_returned_is_spared_until_it_has_generated() -> None:
    machine = machine_of(6, *[Row(4, 12, 12) for _ in range(3)])
    scheduler = machine.scheduler
    scheduler._returned = {2}
    assert scheduler._victim([0, 1, 2], set()) == 1
    scheduler.note_token(2)
    assert scheduler._victim([0, 1, 2], set()) == 2
    scheduler._returned = {1, 2}
    assert scheduler._victim([0, 1, 2], set()) == 2


def test_a_step_that_the_earliest_alone_exhausts_is_told() -> None:
    machine = machine_of(4, Row(4, 12, 12))
    machine.step()
    machine.pool = pool_of(0)
    assert not machine.scheduler.schedule([0], [], 0)
    assert not machine.scheduler.schedule([], [0], 1)


def test_what_could_not_end_alone_does_not_arrive() -> None:
    assert not Machine(pool_of(3), 1).arrive(Row(1, 1, 12))
    assert Machine(pool_of(3), 1).arrive(Row(1, 1, 11))


def test_a_batch_that_reserves_preempts_nothing() -> None:
    running = {}
    for kind in (SimulatedBatch, ReservingBatch):
        batch = kind(pool_of(12), places=10, chunk=CHUNK)
        for _ in range(6):
            assert batch.arrive(Row(4, 6, 20))
        batch.step()
        running[kind] = len(batch.running)
        while batch.running or batch.waiting:
            batch.step()
        assert (batch.scheduler.preemptions > 0) == (kind is SimulatedBatch)
        assert (batch.recomputed > 0) == (kind is SimulatedBatch)
    assert running == {SimulatedBatch: 6, ReservingBatch: 2}


@pytest.mark.parametrize(
    ("growth", "to_come", "to_begin"),
    [
        (Growth(0, 4, 100), 2, 2),
        (Growth(4, 4, 100), 1, 1),
        (Growth(5, 5, 100), 1, 2),
        (Growth(4, 4, 4), 0, 0),
        (Growth(3, 3, 5), 1, 2),
        (Growth(5, 5, 100, owns_last_page=True), 1, 1),
        (Growth(8, 3, 5), 0, 0),
    ],
)
def test_growth_counts_the_rest_of_a_prompt_and_one_more_block(
    growth: Growth, to_come: int, to_begin: int
) -> None:
    assert growth.bytes_to_come(pool_of(10)) == to_come
    assert growth.bytes_to_begin(pool_of(10)) == to_begin


def test_a_complete_ring_needs_no_more() -> None:
    assert Growth(8, 8, 100).bytes_to_come(pool_of(10, ring=2)) == 1
