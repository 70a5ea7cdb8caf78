"""Times of a batch's steps, by its rows and the tokens of its longest row."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

# A median of so many steps: one that waited for another process does not count.
_SAMPLES = 5
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
        """The most drafted tokens whose cost is known or worth a try: one more than were timed; 0
        while no step without drafts is."""
        timed = self._timed(rows)
        return max(timed) if 1 in timed else 0

    def ratio(self, rows: int, tokens: int) -> float | None:
        """The time of a step, in steps without drafts; that of the longest shorter one that was
        timed if none of this length was. None while no step without drafts is timed."""
        timed = self._timed(rows)
        if 1 not in timed:
            return None
        return timed[max(each for each in timed if each <= tokens)] / timed[1]

    def _timed(self, rows: int) -> dict[int, float]:
        """Seconds by tokens; those that are too old are forgotten."""
        kept = {
            tokens: each
            for tokens, each in self._recent[rows].items()
            if self._steps - each.at_step <= _KEPT_STEPS
        }
        self._recent[rows] = kept
        return {tokens: median(each.seconds) for tokens, each in kept.items()}
