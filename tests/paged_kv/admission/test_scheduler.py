"""The scheduler of a batch and the turns of prompts without a model: numbers in, numbers out."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.admission.pool_size import GroupSize, Growth, PoolSize, has_room
from paged_kv.admission.scheduler import OLDEST_TURN, PART_STEPS, Prompt, PromptTurns, Scheduler
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


# Seconds of a step without prompts, and of a token of a prompt.
STEP, TOKEN = 1.0, 1 / 16
PAGE_SIZE = 256


@dataclass
class Load:
    """Prompts beside so many answers, which go on for ever. Its clock counts seconds."""

    answers: int
    turns: PromptTurns = field(default_factory=lambda: PromptTurns(2048, 8, PAGE_SIZE, 0.5))
    step_s: float = STEP
    now: float = 0.0
    steps: int = 0
    longest: float = 0.0
    prompts: dict[int, Prompt] = field(default_factory=dict)
    parts: list[dict[int, int]] = field(default_factory=list)

    def arrive(self, number: int, left: int, priority: int = 0) -> None:
        self.prompts[number] = Prompt(number, priority, number, 0, left)

    def step(self) -> None:
        owed = self.turns.owed_s
        self.turns.begin_step(self.answers, len(self.prompts), STEP, TOKEN, owed)
        chosen = self.turns.chosen(list(self.prompts.values()))
        seconds = self.step_s * (self.answers > 0) + TOKEN * sum(chosen.values()) + 0.01
        self.turns.end_step(seconds, list(self.prompts.values()), chosen)
        self.parts.append(chosen)
        for number, count in chosen.items():
            prompt = self.prompts.pop(number)
            if count < prompt.left:
                left = prompt._replace(computed=prompt.computed + count, left=prompt.left - count)
                self.prompts[number] = left
        self.now, self.steps = self.now + seconds, self.steps + 1
        self.longest = max(self.longest, seconds)

    def run_until(self, ended: Callable[[], bool], most: int = 5_000) -> None:
        while not ended():
            self.step()
            assert self.steps < most, "a prompt waits for ever"


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_answers_keep_their_share_beside_a_long_prompt(share: float) -> None:
    load = Load(8, PromptTurns(2048, 8, PAGE_SIZE, share))
    load.arrive(0, 8_000)
    load.run_until(lambda: not load.prompts)
    assert share <= load.steps * STEP / load.now + 0.01
    assert load.now < 8_000 * TOKEN / (1 - share) * 1.2
    assert load.longest <= (PART_STEPS + 2) * STEP
    # Parts end at the borders of pages.
    assert {part[0] for part in load.parts[:-1] if part} == {PAGE_SIZE}


def test_a_prompt_moves_where_steps_are_slower_than_they_were_measured() -> None:
    load = Load(8, step_s=5 * STEP)
    load.arrive(0, 1_000)
    load.run_until(lambda: not load.prompts, most=400)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    load = Load(8)
    load.arrive(0, 8_000)
    load.run_until(lambda: any(load.parts))
    arrived = load.steps
    load.arrive(1, 50)
    load.arrive(2, 1)  # is cached
    load.run_until(lambda: 2 not in load.prompts)
    assert load.steps == arrived + 1
    load.run_until(lambda: 1 not in load.prompts)
    assert load.steps <= arrived + 5
    # One of a worse priority does.
    load.arrive(3, 50, priority=1)
    load.run_until(lambda: 3 not in load.prompts)
    assert not load.prompts


def test_a_long_prompt_moves_though_shorter_ones_keep_coming() -> None:
    load = Load(0, PromptTurns(100, 8, PAGE_SIZE, 0.5))
    load.arrive(0, 1_000)
    while 0 in load.prompts:
        load.arrive(load.steps + 1, 100)
        load.step()
        assert load.steps <= 10 * OLDEST_TURN


def test_the_oldest_keeps_its_turn_until_there_is_room_for_it() -> None:
    turns = PromptTurns(100, 8, PAGE_SIZE, 0)
    old, young = Prompt(0, 0, 0, 0, 500), Prompt(1, 0, 1, 0, 90)
    for _ in range(3 * OLDEST_TURN):
        turns.end_step(1, [old, young], turns.chosen([young]))
    assert turns.chosen([old, young]) == {0: 100}


def test_while_nobody_answers_a_step_is_as_long_as_it_may_be() -> None:
    load = Load(0)
    load.arrive(0, 5_000)
    load.run_until(lambda: not load.prompts)
    assert [part[0] for part in load.parts] == [2048, 2048, 904]
    # Prompts are padded to the longest, and so many are computed together.
    for number, left in enumerate([1_000, 1_000, 1_000, 40]):
        load.arrive(number, left)
    load.step()
    assert load.parts[-1] == {3: 40, 0: 1_000}
    for number in range(9):
        load.arrive(number, 10)
    load.step()
    assert len(load.parts[-1]) == 8


def test_beside_many_prompts_answers_have_less_so_that_a_batch_fills_quickly() -> None:
    load = Load(1)
    for number in range(7):
        load.arrive(number, 300)
    load.run_until(lambda: not load.prompts)
    assert load.now < 7 * 300 * TOKEN * 1.6
    with pytest.raises(ValueError, match="less than 1"):
        PromptTurns(2048, 8, PAGE_SIZE, 1)


def test_what_is_owed_is_paid_while_no_prompt_is_there() -> None:
    load = Load(8)
    load.arrive(0, 200)
    load.run_until(lambda: not load.prompts)
    assert load.turns.owed_s > STEP
    for _ in range(2 * PART_STEPS):
        load.step()
    assert load.turns.owed_s == 0


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3_000), st.integers(0, 1)), max_size=12),
    st.integers(0, 9),
    st.sampled_from([0, 0.5, 0.9]),
)
@examples(100)
def test_every_prompt_ends(
    arrivals: list[tuple[int, int, int]], answers: int, share: float
) -> None:
    load = Load(answers, PromptTurns(512, 4, PAGE_SIZE, share))
    for number, (at, left, priority) in enumerate(sorted(arrivals)):
        while load.steps < at:
            load.step()
        load.arrive(number, left, priority)
    load.run_until(lambda: not load.prompts)
