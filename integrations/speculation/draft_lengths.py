"""Chooses how many tokens the rows of a batch draft.

A step takes as long as its longest row, for all rows. A row whose drafts are accepted with
probability p emits 1 + p + p^2 + .. + p^n tokens in a step with n drafted ones. `AdaptiveLengths`
takes the n with most tokens a second, from measured times, and 0 if drafts do not pay.

Trying costs time too: a longer step whose drafts are rejected. So tries have an allowance, in steps
without drafts. A step adds what it saved, or takes what it lost; without drafts it adds a little.
Nothing is drafted that may lose more than the allowance. So drafts that never pay cost 1 %, and
a step or two at first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

# The least of so many steps: those that waited for another process took longer.
_SAMPLES = 5
# A step with drafts is known when it was timed twice: once it may have waited.
_LEAST_SAMPLES = 2
# Older times are forgotten: contexts grow, and a machine gets busy.
_KEPT_STEPS = 200


class _Recent:
    """The latest times of one kind of step."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=_SAMPLES)
        self.at_step = 0


class StepTimes:
    """What a step with drafts costs, in steps without them of as many rows."""

    def __init__(self) -> None:
        self._recent: defaultdict[int, dict[int, _Recent]] = defaultdict(dict)
        self._steps = 0

    def note(self, rows: int, tokens: int, seconds: float) -> None:
        """Count a step."""
        self._steps += 1
        recent = self._recent[rows].setdefault(tokens, _Recent())
        recent.seconds.append(seconds)
        recent.at_step = self._steps

    def longest(self, rows: int) -> int:
        """The most drafted tokens whose cost is known or worth a try: one more than in the longest
        step that is known; 0 while no step without drafts is."""
        known = self._known(rows)
        return max(known) if 1 in known else 0

    def plain(self, rows: int) -> float | None:
        """Seconds of a step without drafts; None while none is known."""
        return self._known(rows).get(1)

    def ratio(self, rows: int, tokens: int) -> float | None:
        """The time of a step, in steps without drafts; that of the longest shorter one that is
        known if this length is not. None while no step without drafts is known."""
        known = self._known(rows)
        if 1 not in known:
            return None
        return known[max(each for each in known if each <= tokens)] / known[1]

    def worst(self, rows: int, tokens: int) -> float:
        """What a step may cost, in steps without drafts: as much as its tokens one by one, beyond
        what is known."""
        known = self._known(rows)
        if 1 not in known:
            return tokens
        longest = max(each for each in known if each <= tokens)
        return known[longest] / known[1] + tokens - longest

    def _known(self, rows: int) -> dict[int, float]:
        """The least seconds by tokens; those that are too old are forgotten."""
        kept = {
            tokens: each
            for tokens, each in self._recent[rows].items()
            if self._steps - each.at_step <= _KEPT_STEPS
        }
        self._recent[rows] = kept
        return {
            tokens: min(each.seconds)
            for tokens, each in kept.items()
            if tokens == 1 or len(each.seconds) >= _LEAST_SAMPLES
        }


# A row begins with a chance at which drafts usually pay, so that it is tried.
_FIRST_CHANCE = 0.8
# Of the latest drafted token, in the running mean of a row's acceptance.
_WEIGHT = 0.2
# A row without drafts returns so much of the way to its first chance in a step: it is tried again
# after about 100.
_RECOVERY = 0.01
# A length must gain this much: measured times scatter.
_LEAST_GAIN = 1.05
# Steps without drafts that tries may cost: at first, for each such step, and saved up at most.
_FIRST_ALLOWANCE = 0.5
_ALLOWANCE_PER_STEP = 0.01
_MOST_ALLOWANCE = 4.0


class Acceptance:
    """The chance that the next drafted token of a row is accepted: a running mean."""

    def __init__(self) -> None:
        self.chance = _FIRST_CHANCE

    def note(self, drafted: int, accepted: int) -> None:
        """Count one draft. Tokens after the first rejected one tell nothing."""
        for at in range(min(drafted, accepted + 1)):
            self.chance += _WEIGHT * ((at < accepted) - self.chance)

    def recover(self) -> None:
        """Count a step in which the row might have drafted, and did not."""
        self.chance += _RECOVERY * (_FIRST_CHANCE - self.chance)

    def emitted(self, drafted: int) -> float:
        """Expected tokens of a step with so many drafted ones."""
        return sum(self.chance**at for at in range(drafted + 1))


class Candidate(NamedTuple):
    """A row that can draft.

    Attributes:
        acceptance: of its drafts.
        most: the most tokens that it may draft, at least 1.
    """

    acceptance: Acceptance
    most: int


class DraftLengths(Protocol):
    """Chooses for each step of a batch how many tokens its rows draft."""

    def choose(self, rows: int, candidates: Sequence[Candidate]) -> int:
        """The most tokens to draft for each candidate, at least one of the `rows` of the batch; 0
        means a step without drafts."""
        ...

    def note(self, rows: int, tokens: int, emitted: int, seconds: float) -> None:
        """Learn from a step: the `tokens` of its longest row, and those that all rows `emitted`."""
        ...

    def note_beside(self, rows: int, emitted: int, seconds: float) -> None:
        """Learn what drafts cost beside their own steps: time in which all rows `emitted` so many
        tokens."""
        ...


class FixedLengths:
    """Every row that can draft does, as many tokens as it may."""

    def choose(self, rows: int, candidates: Sequence[Candidate]) -> int:
        """As many tokens as any row may draft."""
        return max(each.most for each in candidates)

    def note(self, rows: int, tokens: int, emitted: int, seconds: float) -> None:
        """Nothing is learned."""

    def note_beside(self, rows: int, emitted: int, seconds: float) -> None:
        """Nothing is learned."""


class AdaptiveLengths:
    """Drafts as many tokens as gain most, and none while drafts do not pay."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._allowance = _FIRST_ALLOWANCE

    def choose(self, rows: int, candidates: Sequence[Candidate]) -> int:
        """The length with most tokens a second. A length is tried after all shorter ones."""
        length = self._best(rows, candidates) if self._allowance > 0 else 0
        if length:
            emitted = _emitted(rows, candidates, length) / rows
            if self._times.worst(rows, length + 1) - emitted > self._allowance:
                length = 0
        if not length:
            for each in candidates:
                each.acceptance.recover()
        return length

    def note(self, rows: int, tokens: int, emitted: int, seconds: float) -> None:
        """Learn the time of a step, and what it saved or lost."""
        self._times.note(rows, tokens, seconds)
        if tokens == 1:
            self._earn(_ALLOWANCE_PER_STEP)
        else:
            # One that took longer than drafting and verifying its tokens one by one has waited for
            # another process.
            self._account(rows, emitted, seconds, 2 * tokens)

    def note_beside(self, rows: int, emitted: int, seconds: float) -> None:
        """Learn what a try lost beside its step: no more than a step, as it may have waited for
        another process."""
        self._account(rows, emitted, seconds, emitted / rows + 1)

    def _account(self, rows: int, emitted: int, seconds: float, most: float) -> None:
        """Count what some time has saved or lost, which is `most` steps without drafts at most."""
        if (plain := self._times.plain(rows)) is not None:
            self._earn(emitted / rows - min(seconds / plain, most))

    def _earn(self, steps: float) -> None:
        self._allowance = min(_MOST_ALLOWANCE, self._allowance + steps)

    def _best(self, rows: int, candidates: Sequence[Candidate]) -> int:
        most = min(max(each.most for each in candidates), self._times.longest(rows))
        best, best_rate = 0, rows * _LEAST_GAIN
        for length in range(1, most + 1):
            ratio = self._times.ratio(rows, length + 1)
            assert ratio is not None, "longest is 0 while steps without drafts are not timed"
            rate = _emitted(rows, candidates, length) / ratio
            if rate > best_rate:
                best, best_rate = length, rate
        return best


def _emitted(rows: int, candidates: Sequence[Candidate], length: int) -> float:
    """Expected tokens of a step in which each candidate drafts so many, or as many as it may."""
    drafting = sum(each.acceptance.emitted(min(length, each.most)) for each in candidates)
    return rows - len(candidates) + drafting
