"""The scheduler of a batch without a model: integers in, integers out."""

from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.admission.growth import Growth, has_room
from paged_kv.admission.pool_size import GroupSize, PoolSize
from paged_kv.admission.scheduler import Scheduler

PAGE = 4
# The longest sequence is computed in a page of steps, as `growth` asks.
CHUNK = 10


def pool_of(blocks: int, ring: int | None = None) -> PoolSize:
    """A pool of one group of layers, or of a second one with a window too."""
    groups = [GroupSize(1, lambda tokens: -(-tokens // PAGE))]
    if ring is not None:
        groups.append(GroupSize(1, lambda tokens: min(-(-tokens // PAGE), ring), is_ring=True))
    return PoolSize(blocks, 0, tuple(groups), PAGE)


@dataclass
class Row:
    """A sequence.

    Attributes:
        prompt: tokens to compute before it generates.
        answer: tokens that it will generate.
        promised: the most that it asked for.
        held: tokens in pages.
        cached: tokens whose pages are cached while it waits.
        generated: tokens so far.
    """

    prompt: int
    answer: int
    promised: int
    held: int = 0
    cached: int = 0
    generated: int = 0
    since_return: int | None = None

    @property
    def target(self) -> int:
        """The tokens to hold before it generates the next one."""
        return self.prompt + self.generated

    def next_held(self) -> int:
        """The tokens that it holds after the next step."""
        return min(self.held + CHUNK, self.target) if self.held < self.target else self.held + 1

    @property
    def growth(self) -> Growth:
        return Growth(self.held, self.target, self.prompt + self.promised)


@dataclass
class Machine:
    """Runs sequences in a pool of integers; it loses cached pages whenever others need them."""

    pool: PoolSize
    places: int
    rows: dict[int, Row] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self)
        self.reserved: list[int] = []

    @property
    def in_use(self) -> int:
        return sum(self.pool.bytes_for(self.rows[each].held) for each in self.running)

    def arrive(self, row: Row) -> None:
        number = len(self.rows)
        self.rows[number] = row
        self.waiting.append(number)

    def reserve(self, running: list[int]) -> bool:
        needed = sum(self.pool.bytes_for(self.rows[each].next_held()) for each in running)
        if needed > self.pool.budget:
            return False
        self.reserved = list(running)
        return True

    def preempt(self, number: int) -> None:
        row = self.rows[number]
        assert number != min(self.running), "the earliest sequence was preempted"
        assert row.since_return != 0, "it was preempted again before it generated a token"
        row.cached, row.held, row.since_return = row.held, 0, None
        self.preempted.append(number)

    def has_room(self, number: int, running: list[int]) -> bool:
        new = self.rows[number].growth.bytes_to_begin(self.pool)
        in_use = sum(self.pool.bytes_for(self.rows[each].held) for each in running)
        return has_room(new, [self.rows[each].growth for each in running], self.pool, in_use)

    def begin(self, number: int) -> bool:
        row = self.rows[number]
        row.held = min(row.cached, row.target)
        if number in self.preempted:
            row.since_return = 0
        if self.reserve([*self.reserved, number]):
            return True
        row.held = 0
        return False

    def step(self) -> None:
        """Schedule, and compute a step of all running sequences."""
        self.reserved = []
        running, waiting = list(self.running), list(self.waiting)
        assert self.scheduler.schedule(running, waiting, self.places - len(running))
        assert sorted([*running, *waiting]) == sorted([*self.running, *self.waiting])
        assert waiting == sorted(waiting)
        self.running, self.waiting = running, waiting
        self._lose_cached()
        for number in list(running):
            self._compute(number)

    def _lose_cached(self) -> None:
        """Cached pages are evicted for used ones, a page at a time."""
        left = self.pool.budget - self.in_use
        for number in self.waiting:
            row = self.rows[number]
            while row.cached and self.pool.bytes_for(row.cached) > left:
                row.cached -= 1
            left -= self.pool.bytes_for(row.cached)

    def _compute(self, number: int) -> None:
        row = self.rows[number]
        was_generating = row.held == row.target
        row.held = row.next_held()
        if was_generating:
            row.generated += 1
            self.scheduler.note_token(number)
            if row.since_return is not None:
                row.since_return += 1
        if row.generated == row.answer:
            self.running.remove(number)
            self.ended.append(number)
            row.held = 0


rows = st.builds(
    lambda prompt, answer, more: Row(prompt, answer, answer + more),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 20),
)


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
                machine.arrive(replace(row))
        if machine.running or machine.waiting:
            machine.step()
        assert len(machine.running) <= places
    assert sorted(machine.ended) == list(range(len(arrivals)))
    assert machine.in_use == 0


def machine_of(blocks: int, *sequences: Row, places: int = 10) -> Machine:
    machine = Machine(pool_of(blocks), places)
    for row in sequences:
        machine.arrive(row)
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
    machine = machine_of(8, Row(20, 20, 20), Row(4, 20, 20))
    machine.step()
    machine.step()
    assert machine.running == [0, 1]
    machine = machine_of(7, Row(20, 20, 20), Row(4, 20, 20))
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


def test_who_has_returned_is_spared_until_it_has_generated() -> None:
    machine = machine_of(6, *[Row(4, 12, 12) for _ in range(3)])
    scheduler = machine.scheduler
    scheduler._returned = {2}
    assert scheduler._victim([0, 1, 2]) == 1
    scheduler.note_token(2)
    assert scheduler._victim([0, 1, 2]) == 2
    scheduler._returned = {1, 2}
    assert scheduler._victim([0, 1, 2]) == 2


def test_a_step_that_the_earliest_alone_exhausts_is_told() -> None:
    machine = machine_of(2, Row(4, 12, 12))
    for _ in range(5):
        machine.step()
    assert machine.rows[0].held == 8
    assert not machine.scheduler.schedule([0], [], 0)
    assert not machine_of(1, Row(8, 1, 1)).scheduler.schedule([], [0], 1)


@pytest.mark.parametrize(
    ("growth", "to_come", "to_begin"),
    [
        (Growth(0, 4, 100), 2, 2),
        (Growth(4, 4, 100), 1, 1),
        (Growth(5, 5, 100), 1, 2),
        (Growth(4, 4, 4), 0, 0),
        (Growth(3, 3, 5), 1, 2),
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
