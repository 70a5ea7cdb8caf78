"""The turns of prompts without a model: seconds and tokens in, tokens out."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.admission.prompt_turns import OLDEST_TURN, PART_STEPS, Prompt, PromptTurns
from tests.support.examples import examples

# Seconds of a step without prompts, and of a token of a prompt.
STEP, TOKEN = 1.0, 1 / 16
PAGE = 256


@dataclass
class Load:
    """Prompts beside so many answers, which go on for ever. Its clock counts seconds."""

    answers: int
    turns: PromptTurns = field(default_factory=lambda: PromptTurns(2048, 8, PAGE, 0.5))
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
    load = Load(8, PromptTurns(2048, 8, PAGE, share))
    load.arrive(0, 8_000)
    load.run_until(lambda: not load.prompts)
    assert share <= load.steps * STEP / load.now + 0.01
    assert load.now < 8_000 * TOKEN / (1 - share) * 1.2
    assert load.longest <= (PART_STEPS + 2) * STEP
    # Parts end at the borders of pages.
    assert {part[0] for part in load.parts[:-1] if part} == {PAGE}


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
    load = Load(0, PromptTurns(100, 8, PAGE, 0.5))
    load.arrive(0, 1_000)
    while 0 in load.prompts:
        load.arrive(load.steps + 1, 100)
        load.step()
        assert load.steps <= 10 * OLDEST_TURN


def test_the_oldest_keeps_its_turn_until_there_is_room_for_it() -> None:
    turns = PromptTurns(100, 8, PAGE, 0)
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
        PromptTurns(2048, 8, PAGE, 1)


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
    load = Load(answers, PromptTurns(512, 4, PAGE, share))
    for number, (at, left, priority) in enumerate(sorted(arrivals)):
        while load.steps < at:
            load.step()
        load.arrive(number, left, priority)
    load.run_until(lambda: not load.prompts)
