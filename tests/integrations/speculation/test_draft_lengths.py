"""How many tokens to draft, from acceptance and times."""

from collections.abc import Callable
from itertools import product
from random import Random

from paged_kv.integrations.speculation.draft_lengths import (
    Acceptance,
    Candidate,
    DraftLengths,
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
        self.lengths = DraftLengths()
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
            self.lengths.record(self.rows, length + 1, seconds)
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
        candidate.acceptance.record(length, count)
        return count


def test_drafts_never_cost_more_than_three_percent() -> None:
    for clock, chance, rows in product(
        (flat, steep, crowded, doubled), (0.0, 0.3, 0.6, 0.95), (1, 8)
    ):
        simulation = Simulation(clock, rows, chance)
        simulation.run(200)
        assert simulation.speed > 0.97, (clock.__name__, chance, rows)


def test_tries_of_new_rows_cost_little() -> None:
    """Of whole batches of short answers, whose rows are all tried anew."""
    for clock, rows in product((flat, crowded, doubled), (1, 8)):
        simulation = Simulation(clock, rows, 0.0)
        for _ in range(10):
            simulation.begin_replies()
            simulation.run(100)
        assert sum(simulation.chosen) > 0
        assert simulation.speed > 0.96, (clock.__name__, rows)


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
    """A step that is not known is taken to cost what the longest shorter one does, and one that
    waited for another process does not count."""
    times = DraftLengths()
    assert times.ratios(2) == []
    for tokens, seconds in ((1, 2.0), (3, 5.0), (3, 5.0)):
        times.record(2, tokens, seconds)
    assert times.ratios(2) == [1.0, 1.0, 2.5, 2.5]
    assert times.ratios(1) == []
    for tokens, seconds in ((1, 40.0), (1, 1.0), (2, 50.0)):
        times.record(1, tokens, seconds)
    assert times.ratios(1) == [1.0, 1.0]
    times.record(1, 2, 1.5)
    assert times.ratios(1) == [1.0, 1.5, 1.5]
