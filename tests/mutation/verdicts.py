"""Judges what the tests do with a mutant."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tests.mutation.checkout import Checkout, Run
from tests.mutation.mutants import Mutant

# A run counts as hanging if it takes this many times as long as with sound code; the minimum allows
# for a busy machine.
LIMIT_FACTOR, LEAST_LIMIT_S = 10.0, 100.0
SOUND_LIMIT_S = 1200.0
# Quick tests notice most mutants; the slow ones run only for those that these let pass.
MARKERS = "not slow", "slow"


class Outcome(Enum):
    KILLED = "killed"
    SURVIVED = "SURVIVED"
    EXCUSED = "excused"
    BROKEN = "BROKEN"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Verdict:
    """The result of a mutant.

    Attributes:
        outcome: what became of it.
        note: the test that noticed it, or why it was not tried.
        seconds: that its tests took.
    """

    outcome: Outcome
    note: str = ""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        """Whether somebody must mend the tests or the list."""
        return self.outcome in (Outcome.SURVIVED, Outcome.BROKEN)


class Judge:
    """Tries mutants in a copy of the checkout, one at a time."""

    def __init__(self, checkout: Checkout, instruction_sets: list[str]) -> None:
        self._checkout = checkout
        self._instruction_sets = instruction_sets
        self._sound: dict[tuple[tuple[str, ...], str, str], Run] = {}

    def judge(self, mutant: Mutant) -> Verdict:
        """Run a mutant's tests without it, then with it: the slow ones if no other notices it."""
        if mutant.isa and mutant.isa not in self._instruction_sets:
            return Verdict(Outcome.SKIPPED, f"this machine has no {mutant.isa}")
        verdict = Verdict(Outcome.SKIPPED, "its tests are skipped on this machine")
        for marker in MARKERS:
            sound = self._sound_run(mutant, marker)
            if sound.ran_nothing:
                continue
            if sound.status != 0:
                return Verdict(Outcome.BROKEN, f"without it fails {sound.failure or sound.output}")
            verdict = self._try(mutant, marker, sound)
            if verdict.outcome not in (Outcome.SURVIVED, Outcome.EXCUSED):
                break
        return verdict

    def _try(self, mutant: Mutant, marker: str, sound: Run) -> Verdict:
        limit_s = max(LEAST_LIMIT_S, LIMIT_FACTOR * sound.seconds)
        try:
            with self._checkout.changed(mutant):
                run = self._checkout.run(mutant.tests, mutant.isa, marker, limit_s)
        except ValueError as error:
            return Verdict(Outcome.BROKEN, str(error))
        return verdict_of(run, mutant)

    def _sound_run(self, mutant: Mutant, marker: str) -> Run:
        key = mutant.tests, mutant.isa, marker
        if key not in self._sound:
            self._sound[key] = self._checkout.run(*key, SOUND_LIMIT_S)
        return self._sound[key]


def verdict_of(run: Run, mutant: Mutant) -> Verdict:
    """What the tests of a mutant report with it applied."""
    if run.status == 0:
        outcome = Outcome.EXCUSED if mutant.survives else Outcome.SURVIVED
        return Verdict(outcome, mutant.survives, run.seconds)
    if run.status is not None and run.status > 1:
        return Verdict(Outcome.BROKEN, f"pytest cannot run: {run.output}", run.seconds)
    if mutant.survives:
        reason = f"the list says that it survives: {mutant.survives}"
        return Verdict(Outcome.BROKEN, f"{run.failure} notices it, and {reason}", run.seconds)
    if run.status is None:
        return Verdict(Outcome.KILLED, "it hangs", run.seconds)
    if run.status < 0:
        return Verdict(Outcome.KILLED, f"signal {-run.status}", run.seconds)
    return Verdict(Outcome.KILLED, run.failure, run.seconds)
