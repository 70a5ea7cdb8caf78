"""Times of a batch's steps, by its rows and the tokens of its longest row."""

from __future__ import annotations

from collections import defaultdict, deque

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
