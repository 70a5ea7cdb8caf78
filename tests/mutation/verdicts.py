"""Judges what the tests do with a mutant."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tests.mutation.checkout import Checkout, Run
from tests.mutation.mutants import Mutant, Round

# A run counts as hanging if it takes this many times as long as with sound code; the minimum allows
# for a busy machine.
LIMIT_FACTOR, LEAST_LIMIT_S = 10.0, 100.0
SOUND_LIMIT_S = 1200.0


class Outcome(Enum):
    KILLED = "killed"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant, the test that noticed or why none did, and how long it took."""

    outcome: Outcome
    note: str = ""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        """Whether somebody must mend the tests or the list."""
        return self.outcome in (Outcome.SURVIVED, Outcome.BROKEN)


class Judge:
    """Tries mutants in a copy of the checkout, one at a time."""

    def __init__(self, checkout: Checkout) -> None:
        self._checkout = checkout
        self._sound: dict[Round, Run] = {}

    def judge(self, mutant: Mutant) -> Verdict:
        """Run a mutant's tests without it, then with it, until a round notices it."""
        verdict = Verdict(Outcome.SKIPPED, "its tests are skipped on this machine")
        for each in mutant.rounds:
            sound = self._sound_run(each)
            if sound.ran_nothing:
                continue
            if sound.status != 0:
                return Verdict(Outcome.BROKEN, f"without it fails {sound.failure or sound.output}")
            verdict = self._try(mutant, each, max(LEAST_LIMIT_S, LIMIT_FACTOR * sound.seconds))
            if verdict.outcome is not Outcome.SURVIVED:
                break
        return verdict

    def _try(self, mutant: Mutant, tests: Round, limit_s: float) -> Verdict:
        try:
            with self._checkout.changed(mutant):
                return verdict_of(self._checkout.run(tests, limit_s))
        except ValueError as error:
            return Verdict(Outcome.BROKEN, str(error))

    def _sound_run(self, tests: Round) -> Run:
        if tests not in self._sound:
            self._sound[tests] = self._checkout.run(tests, SOUND_LIMIT_S)
        return self._sound[tests]


def verdict_of(run: Run) -> Verdict:
    """What tests report with a mutant applied."""
    if run.status == 0:
        return Verdict(Outcome.SURVIVED, seconds=run.seconds)
    if run.status is None:
        return Verdict(Outcome.KILLED, "it hangs", run.seconds)
    if run.status < 0:
        return Verdict(Outcome.KILLED, f"signal {-run.status}", run.seconds)
    if run.status == 1 or run.failure:
        return Verdict(Outcome.KILLED, run.failure, run.seconds)
    return Verdict(Outcome.BROKEN, f"pytest cannot run: {run.output}", run.seconds)
