"""Chooses how many tokens the rows of a batch draft.

A step takes as long as its longest row, for all rows. A row whose drafts are accepted with
probability p emits 1 + p + p^2 + .. + p^n tokens in a step with n drafted ones. `DraftLengths`
takes the n with most tokens a second, from measured times, and 0 if drafts do not pay.

What is not known is tried: a length that was not timed twice, and after about 100 steps a row whose
drafts were rejected. So drafts that never pay cost about 1 %, and up to 3 % in batches of short
answers, whose rows are all new.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

# The least of so many steps: those that waited for another process took longer.
_SAMPLES = 5
# A step with drafts is known when it was timed twice: once it may have waited, or the draft has
# read a whole prompt.
_LEAST_SAMPLES = 2
# Older times are forgotten: contexts grow, and a machine gets busy.
_KEPT_STEPS = 400
# A row begins with a chance at which drafts usually pay, so that it is tried.
_FIRST_CHANCE = 0.8
# Of the latest drafted token, in the running mean of a row's acceptance.
_WEIGHT = 0.2
# A row without drafts returns so much of the way to its first chance in a step: it is tried again
# after about 100.
_RECOVERY = 0.01
# A length must gain this much: measured times scatter.
_LEAST_GAIN = 1.05


class Acceptance:
    """The chance that the next drafted token of a row is accepted: a running mean."""

    def __init__(self) -> None:
        self.chance = _FIRST_CHANCE

    def record(self, drafted: int, accepted: int) -> None:
        """Count one draft. Tokens after the first rejected one tell nothing."""
        for at in range(min(drafted, accepted + 1)):
            self.chance += _WEIGHT * ((at < accepted) - self.chance)

    def recover(self) -> None:
        """Count a step in which the row might have drafted, and did not."""
        self.chance += _RECOVERY * (_FIRST_CHANCE - self.chance)

    def emitted(self, drafted: int) -> float:
        return sum(self.chance**at for at in range(drafted + 1))


class Candidate(NamedTuple):
    """A row that can draft."""

    acceptance: Acceptance  # of its drafts
    most: int  # the most tokens that it may draft, at least 1


class DraftLengths:
    """Chooses for each step of a batch how many tokens its rows draft: as many as gain most, and
    none while drafts do not pay."""

    def __init__(self) -> None:
        # When the latest steps of so many rows and tokens were, and how long they took.
        self._recent: defaultdict[tuple[int, int], deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=_SAMPLES)
        )
        self._steps = 0

    def choose(self, rows: int, candidates: Sequence[Candidate]) -> int:
        """The most tokens to draft for each candidate, at least one of the `rows` of the batch; 0
        means a step without drafts. A length is tried after all shorter ones."""
        most = max(each.most for each in candidates)
        best, best_rate = 0, rows * _LEAST_GAIN
        for length, ratio in enumerate(self.ratios(rows)[: most + 1]):
            rate = _emitted(rows, candidates, length) / ratio
            if length and rate > best_rate:
                best, best_rate = length, rate
        if not best:
            for each in candidates:
                each.acceptance.recover()
        return best

    def record(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn the time of a step, drafting included, from the `tokens` of its longest row."""
        self._steps += 1
        self._recent[rows, tokens].append((self._steps, seconds))

    def ratios(self, rows: int) -> list[float]:
        """The times of steps that draft 0, 1, .. tokens, in steps without drafts, up to one token
        more than in the longest step that is known. What is not known is taken to cost what the
        longest shorter one does. Empty while no step without drafts is known."""
        known = self._known(rows)
        if 1 not in known:
            return []
        found: list[float] = []
        for tokens in range(1, max(known) + 2):
            found.append(known[tokens] / known[1] if tokens in known else found[-1])
        return found

    def _known(self, rows: int) -> dict[int, float]:
        """The least seconds by tokens; those that are too old are forgotten."""
        known = {}
        for (of_rows, tokens), recent in list(self._recent.items()):
            if of_rows != rows:
                continue
            if self._steps - recent[-1][0] > _KEPT_STEPS:
                del self._recent[of_rows, tokens]
            elif tokens == 1 or len(recent) >= _LEAST_SAMPLES:
                known[tokens] = min(seconds for _, seconds in recent)
        return known


class FixedLengths(DraftLengths):
    """Every row that can draft does, as many tokens as it may."""

    def choose(self, rows: int, candidates: Sequence[Candidate]) -> int:
        return max(each.most for each in candidates)


def _emitted(rows: int, candidates: Sequence[Candidate], length: int) -> float:
    """Expected tokens of a step in which each candidate drafts so many, or as many as it may."""
    drafting = sum(each.acceptance.emitted(min(length, each.most)) for each in candidates)
    return rows - len(candidates) + drafting
