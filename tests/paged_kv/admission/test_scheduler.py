"""The scheduler of a batch without a model: integers in, integers out."""

from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from paged_kv.admission.growth import Growth, has_room
from paged_kv.admission.pool_size import GroupSize, PoolSize
from paged_kv.admission.scheduler import Scheduler
from tests.support.examples import examples

PAGE = 4
# The longest sequence is computed in 4 steps, the lookahead of these pools.
CHUNK = 10


def pool_of(blocks: int, ring: int | None = None) -> PoolSize:
    """A pool of one group of layers, or of a second one with a window too."""
    groups = [GroupSize(1, page_size=PAGE)]
    if ring is not None:
        groups.append(GroupSize(1, ring, page_size=PAGE))
    return PoolSize(blocks, 0, tuple(groups), lookahead=PAGE)


@dataclass
class Row:
    """A sequence: the tokens of its prompt and of its answer, and the most that it may generate.

    Attributes:
        held: tokens that it holds.
        cached: tokens that are still cached while it waits.
        generated: tokens so far.
    """

    prompt: int
    answer: int
    max_tokens: int
    held: int = 0
    cached: int = 0
    generated: int = 0

    @property
    def target(self) -> int:
        """Tokens to hold before it generates the next one."""
        return self.prompt + self.generated

    @property
    def growth(self) -> Growth:
        return Growth(self.held, self.target, self.prompt + self.max_tokens)

    @property
    def next_held(self) -> int:
        """Tokens that it holds after the next step."""
        return min(self.held + CHUNK, self.target) if self.held < self.target else self.held + 1


class Machine:
    """Runs sequences without a model, and checks each decision of the scheduler. The first sequence
    in order, which is that of priorities and of arrivals, is never preempted, but for one of a
    better priority."""

    def __init__(self, pool: PoolSize, places: int, priorities: list[int] | None = None) -> None:
        self.pool, self.places, self.priorities = pool, places, priorities
        self.scheduler = Scheduler(self, self.order)
        self.sequences: list[Row] = []
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.preempted: list[int] = []
        self.ended: list[int] = []
        # Tokens that a sequence has generated since it returned.
        self.since_return: dict[int, int] = {}
        self._reserved: list[int] = []

    def order(self, number: int) -> tuple[int, int]:
        return self.priorities[number] if self.priorities else 0, number

    def arrive(self, sequence: Row) -> None:
        self.waiting.append(len(self.sequences))
        self.sequences.append(sequence)
        self.waiting.sort(key=self.order)

    def reserve(self, running: list[int]) -> bool:
        self._reserved = list(running)
        return self._bytes_after(running) <= self.pool.budget

    def awaits(self, number: int, running: list[int]) -> bool:
        return False

    def has_room(self, number: int, running: list[int]) -> bool:
        sequences = [self.sequences[each] for each in running]
        in_use = sum(self.pool.bytes_for(each.held) for each in sequences)
        new_bytes = self.sequences[number].growth.bytes_to_begin(self.pool)
        return has_room(new_bytes, [each.growth for each in sequences], self.pool, in_use)

    def would_have_room(self, number: int, running: list[int], victims: list[int]) -> bool:
        assert not self.has_room(number, running)
        return self.has_room(number, [each for each in running if each not in victims])

    def begin(self, number: int) -> bool:
        sequence = self.sequences[number]
        sequence.held = sequence.cached
        if not self.reserve([*self._reserved, number]):
            sequence.held = 0
            self._reserved.remove(number)
            return False
        sequence.cached = 0
        if number in self.preempted:
            self.since_return[number] = 0
        return True

    def preempt(self, number: int) -> None:
        first = min(self.running + self.waiting[:1], key=self.order)
        assert number != first, "the first sequence was preempted"
        spared = [each for each in self.running if self.since_return.get(each, 1) == 0]
        behind = [each for each in self.running if self.order(each) > self.order(number)]
        assert {*behind} <= {*spared}, "one that comes later was not preempted"
        if self.priorities is None:
            assert number not in spared, "preempted again before it generated a token"
        self.preempted.append(number)
        self.since_return.pop(number, None)
        sequence = self.sequences[number]
        sequence.cached, sequence.held = sequence.held, 0

    def step(self) -> None:
        self._reserved = []
        places = self.places - len(self.running)
        assert self.scheduler.schedule(self.running, self.waiting, places)
        self.waiting.sort(key=self.order)
        free = self.pool.promisable - self._bytes_after(self.running)
        for number in self.waiting:  # What the running ones need is evicted.
            sequence = self.sequences[number]
            if self.pool.bytes_for(sequence.cached) > free:
                sequence.cached = 0
            free -= self.pool.bytes_for(sequence.cached)
        for number in list(self.running):
            self._compute(number, self.sequences[number])

    def _compute(self, number: int, sequence: Row) -> None:
        generates = sequence.held == sequence.target
        sequence.held = sequence.next_held
        if generates:
            sequence.generated += 1
            self.scheduler.note_token(number)
            if number in self.since_return:
                self.since_return[number] += 1
        if sequence.generated == sequence.answer:
            self.running.remove(number)
            self.ended.append(number)
            sequence.held = 0

    def _bytes_after(self, running: list[int]) -> int:
        return sum(self.pool.bytes_for(self.sequences[each].next_held) for each in running)


rows = st.builds(
    lambda prompt, answer, more: Row(prompt, answer, answer + more),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 20),
)


@examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 6), rows, st.integers(-2, 2)), min_size=1, max_size=12),
    st.booleans(),
    st.integers(15, 40),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 12),
)
def test_every_sequence_ends_and_the_last_in_order_are_preempted(
    arrivals: list[tuple[int, Row, int]],
    has_priorities: bool,
    blocks: int,
    ring: int | None,
    places: int,
) -> None:
    """Whatever arrives when. A sequence alone needs at most 60 tokens, which are 15 blocks."""
    priorities = [priority for *_, priority in arrivals] if has_priorities else None
    machine = Machine(pool_of(blocks + (ring or 0), ring), places, priorities)
    times = list(accumulate(after for after, *_ in arrivals))
    work = sum(row.prompt + row.answer for _, row, _ in arrivals)
    for step in range(times[-1] + work * len(arrivals)):
        for time, (_, row, _) in zip(times, arrivals, strict=True):
            if time == step:
                machine.arrive(replace(row))
        if machine.running or machine.waiting:
            machine.step()
        assert len(machine.running) <= places
    assert sorted(machine.ended) == list(range(len(arrivals)))


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
    # An answer that ends in the block of its prompt needs no more.
    machine = machine_of(8, *[Row(3, 1, 1) for _ in range(9)])
    machine.step()
    assert len(machine.running) + len(machine.ended) == 8


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


class Limited:
    """Runs as many sequences as there is room for."""

    room = 2
    can_make_room = True
    awaiting: tuple[int, ...] = ()

    def reserve(self, running: list[int]) -> bool:
        return len(running) <= self.room

    def preempt(self, number: int) -> None:
        pass

    def awaits(self, number: int, running: list[int]) -> bool:
        return number in self.awaiting

    def has_room(self, number: int, running: list[int]) -> bool:
        return len(running) < self.room

    def would_have_room(self, number: int, running: list[int], victims: list[int]) -> bool:
        return self.can_make_room

    def begin(self, number: int) -> bool:
        return True


def test_who_has_returned_is_spared_until_it_has_generated() -> None:
    runner, running, waiting = Limited(), [0, 1, 2], list[int]()
    scheduler = Scheduler(runner, lambda number: (0, number))

    def schedule(room: int) -> list[int]:
        runner.room = room
        assert scheduler.schedule(running, waiting, 1)
        return running

    assert schedule(2) == [0, 1]
    assert schedule(3) == [0, 1, 2]
    assert schedule(2) == [0, 2]
    assert schedule(3) == [0, 1, 2]
    scheduler.note_token(2)
    assert schedule(2) == [0, 1]


def test_one_of_a_better_priority_takes_the_place_of_as_few_as_it_needs() -> None:
    for can_make_room, fixed, left in (
        (True, set[int](), [0, 1, 5]),
        (True, {2}, [0, 2, 5]),
        (False, set[int](), [0, 1, 2]),
    ):
        runner, running, waiting = Limited(), [0, 1, 2], [5, 4]
        runner.room, runner.can_make_room = 3, can_make_room
        scheduler = Scheduler(runner, lambda number: (-(number == 5), number))
        assert scheduler.schedule(running, waiting, 3, fixed)
        assert sorted(running) == left
    # Of equal ones, and of one that has just returned, it takes none.
    runner, running, waiting = Limited(), [0, 1], [5]
    scheduler = Scheduler(runner, lambda number: (-(number == 5), number))
    scheduler._returned = {0, 1}
    assert scheduler.schedule(running, waiting, 3)
    assert running == [0, 1]


def test_others_begin_before_one_that_awaits_what_a_running_one_computes() -> None:
    runner, running, waiting = Limited(), [0], [1, 2]
    runner.awaiting = (1,)
    scheduler = Scheduler(runner, lambda number: (0, number))
    assert scheduler.schedule(running, waiting, 3)
    assert (running, waiting) == ([0, 2], [1])


def test_growth_counts_the_rest_of_a_prompt_and_one_more_block() -> None:
    for growth, to_come, to_begin in (
        (Growth(0, 4, 100), 2, 2),
        (Growth(4, 4, 100), 1, 1),
        (Growth(5, 5, 100), 1, 2),
        (Growth(4, 4, 4), 0, 0),
        (Growth(3, 3, 5), 1, 2),
        (Growth(5, 5, 100, owns_last_page=True), 1, 1),
        (Growth(8, 3, 5), 0, 0),
    ):
        assert growth.bytes_to_come(pool_of(10)) == to_come
        assert growth.bytes_to_begin(pool_of(10)) == to_begin
    # So much of an answer as is reserved must fit besides.
    assert Growth(4, 4, 24).with_reserve(0.5).bytes_to_come(pool_of(10)) == 4
    assert Growth(4, 4, 24).with_reserve(1).bytes_to_come(pool_of(10)) == 5
    # A complete ring needs no more.
    assert Growth(8, 8, 100).bytes_to_come(pool_of(10, ring=2)) == 1


def test_the_longest_sequence_is_one_that_fits_alone() -> None:
    assert pool_of(10).longest == 40
    assert replace(pool_of(10), slack=3).longest == 28
    assert replace(pool_of(10), slack=11).longest == 0
    ring = GroupSize(1, ring=2)
    assert PoolSize(2, 0, (ring,)).longest == inf
