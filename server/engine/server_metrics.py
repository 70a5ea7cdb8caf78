"""Counters and histograms of a server, and the watch of its steps. Numbers only grow, and one
thread writes each."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic

# The same buckets as vLLM's metrics of these names, so that its dashboards fit.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
OUTPUT_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
WHOLE_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts durations in buckets, by upper bounds in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def note(self, seconds: float) -> None:
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, int]]:
        """For each bound, and for "+Inf", the number of durations up to it."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


@dataclass
class ServerMetrics:
    """The metrics of one server."""

    prompt_tokens: int = 0  # of jobs that began
    cached_tokens: int = 0  # those of them that hit a cached prefix
    generation_tokens: int = 0
    prepared_tokens: int = 0  # tokens of next turns that were computed before they were asked for
    prepared_found: int = 0  # those of them that later prompts have found
    prepared_unused: int = 0  # those that were computed for nothing
    answered: Counter[int] = field(default_factory=Counter)  # requests by the status of the answer
    refused: int = 0  # requests answered with 503, or whose stream ended with such an error
    # Choices by finish reason; "abort" if the client left.
    finished: Counter[str] = field(default_factory=Counter)
    # Seconds to a request's first token, on average between the tokens of a choice, to the last.
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    output_token: Histogram = field(default_factory=lambda: Histogram(OUTPUT_TOKEN_S))
    whole_request: Histogram = field(default_factory=lambda: Histogram(WHOLE_REQUEST_S))


# A step that takes so many times as long as the longest of the latest ones is not just a long one.
_TIMES = 20
_STEPS = 32


class StepWatch:
    """The present step. None hangs that has not taken longer than the timeout."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began: float | None = None
        self._latest: deque[float] = deque(maxlen=_STEPS)

    @contextmanager
    def step(self) -> Iterator[None]:
        began = self._began = monotonic()
        try:
            yield
        finally:
            self._began = None
            self._latest.append(monotonic() - began)

    @property
    def age_s(self) -> float:
        """How long the present step has taken; 0 between steps."""
        began = self._began
        return 0.0 if began is None else monotonic() - began

    @property
    def is_hanging(self) -> bool:
        """Whether it has taken longer than the timeout and than 20 times the longest of the latest
        steps."""
        age_s = self.age_s
        return age_s > self._timeout_s and age_s > _TIMES * max(tuple(self._latest), default=0.0)
