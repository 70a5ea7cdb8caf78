"""How many tokens to draft, from acceptance and times."""

from collections.abc import Callable
from itertools import product
from random import Random

from paged_kv.integrations.speculation.draft_lengths import (
    Acceptance,
    AdaptiveLengths,
    Candidate,
    StepTimes,
)

MOST = 4
# Seconds of a step by rows and tokens of the longest row.
Clock = Callable[[int, int], float]


def flat(rows: int, tokens: int) -> float:
    """Weights are read once: drafted tokens cost little, as on a GPU."""
    return 1 + 0.02 * rows * tokens


def steep(rows: int, tokens: int) -> float:
    """A drafted token costs as much as another step."""
    return float(rows * tokens)


def crowded(rows: int, tokens: int) -> float:
    """Computing limits full batches only."""
    return max(4.0, rows * tokens)


def doubled(rows: int, tokens: int) -> float:
    """Drafting a token costs as much as verifying it."""
    return rows * (2.0 * tokens - 1)


class Simulation:
    """A batch with times from a clock, whose drafted tokens are accepted by chance."""

    def __init__(self, clock: Clock, rows: int, chance: float) -> None:
        self.clock, self.rows, self.chance = clock, rows, chance
        self.lengths = AdaptiveLengths()
        self.chosen: list[int] = []
        self.seconds = self.emitted = 0.0
        self._random = Random(5)
        self.begin_replies()

    def begin_replies(self) -> None:
        """Replace all rows by new ones, of whose drafts nothing is known."""
        self._candidates = [Candidate(Acceptance(), MOST) for _ in range(self.rows)]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            length = self.lengths.choose(self.rows, self._candidates)
            emitted = sum(1 + self._accepted(each, length) for each in self._candidates)
            seconds = self.clock(self.rows, length + 1)
            self.lengths.note(self.rows, length + 1, emitted, seconds)
            self.chosen.append(length)
            self.seconds += seconds
            self.emitted += emitted

    @property
    def speed(self) -> float:
        """Tokens a second, beside those without drafts."""
        return self.emitted / self.seconds * self.clock(self.rows, 1) / self.rows

    def _accepted(self, candidate: Candidate, length: int) -> int:
        count = 0
        while count < length and self._random.random() < self.chance:
            count += 1
        candidate.acceptance.note(length, count)
        return count


def test_drafts_never_cost_more_than_three_percent() -> None:
    for clock, chance, rows in product(
        (flat, steep, crowded, doubled), (0.0, 0.3, 0.6, 0.95), (1, 8)
    ):
        simulation = Simulation(clock, rows, chance)
        simulation.run(200)
        assert simulation.speed > 0.97, (clock.__name__, chance, rows)


def test_what_drafting_costs_counts_too() -> None:
    """A try of a slow draft is followed by as many steps without drafts as it has cost."""
    simulation = Simulation(doubled, 1, 0.0)
    for _ in range(10):
        simulation.begin_replies()
        simulation.run(100)
    assert sum(simulation.chosen) > 0
    assert simulation.speed > 0.985


def test_what_tries_cost_beside_their_steps_counts_too() -> None:
    """As the step behind a try, which begins late. No more than a step counts."""
    tries = []
    for seconds in (0.0, 0.5, 1.0, 100.0):
        lengths, candidate = AdaptiveLengths(), Candidate(Acceptance(), 1)
        drafted = 0
        for _ in range(400):
            length = lengths.choose(1, [candidate])
            lengths.note(1, length + 1, 1, 1 + 0.2 * length)
            if length:
                drafted += 1
                lengths.note_beside(1, 0, seconds)
                lengths.note_beside(1, 1, 1.0)  # nothing was lost
        tries.append(drafted)
    assert tries[0] > tries[1] > tries[2] == tries[3] > 0


def test_a_row_that_begins_to_repeat_itself_drafts_again() -> None:
    simulation = Simulation(flat, 1, 0.0)
    simulation.run(300)
    assert sum(simulation.chosen[-50:]) < 25
    simulation.chance = 1.0
    simulation.run(300)
    assert sum(simulation.chosen[-50:]) > 180


def test_a_machine_that_gets_faster_at_long_steps_is_noticed() -> None:
    simulation = Simulation(steep, 4, 0.95)
    simulation.run(120)
    assert not any(simulation.chosen[-50:])
    simulation.clock = flat
    simulation.run(400)
    assert sum(simulation.chosen[-50:]) > 150


def test_steps_are_timed() -> None:
    """A longer one is taken to cost what the longest timed one does, an unknown one its tokens one
    by one at worst, and one that waited for another process does not count."""
    times = StepTimes()
    assert (times.longest(2), times.ratio(2, 3), times.plain(2)) == (0, None, None)
    assert times.worst(2, 3) == 3
    for tokens, seconds in ((1, 2.0), (3, 5.0), (3, 5.0)):
        times.note(2, tokens, seconds)
    assert [times.ratio(2, tokens) for tokens in (1, 2, 3, 4)] == [1.0, 1.0, 2.5, 2.5]
    assert (times.longest(2), times.longest(1), times.plain(2)) == (3, 0, 2.0)
    assert times.worst(2, 4) == 3.5
    for tokens, seconds in ((1, 40.0), (1, 1.0), (2, 50.0)):
        times.note(1, tokens, seconds)
    assert times.ratio(1, 2) == 1.0
    times.note(1, 2, 1.5)
    assert times.ratio(1, 2) == 1.5


def test_drafts_of_a_few_rows_wait_until_their_try_is_saved_up() -> None:
    """All rows of a batch wait for the longer step, so it may lose a whole step."""
    lengths = AdaptiveLengths()
    all_rows = [Candidate(Acceptance(), 1) for _ in range(16)]
    waited = 0
    lengths.note(16, 1, 16, 1.0)
    assert lengths.choose(16, all_rows) == 1
    while not lengths.choose(16, all_rows[:4]):
        lengths.note(16, 1, 16, 1.0)
        waited += 1
    assert 20 <= waited <= 40
    # Once such a step is known to cost little, they need no more saving.
    for _ in range(2):
        lengths.note(16, 2, 18, 1.05)
    assert lengths.choose(16, all_rows[:4]) == 1
