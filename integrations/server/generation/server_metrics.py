"""What a server counts. Numbers only grow, and each is written by one thread."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

# As vLLM's of the same names, so that its dashboards fit.
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
    """Durations, by upper bounds of their size in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def note(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, int]]:
        """For each bound, and for "+Inf", how many were not larger."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


@dataclass
class ServerMetrics:
    """Of one server.

    Attributes:
        prompt_tokens: of jobs that began.
        cached_tokens: those of them that were not computed.
        generation_tokens: that were generated.
        refused: jobs that were answered with 503.
        finished: choices, by the reason why they ended; "abort" where the client left.
        first_token: until a request's first token was sent.
        output_token: of a choice, between its tokens, on average.
        whole_request: until all was sent.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    refused: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    output_token: Histogram = field(default_factory=lambda: Histogram(OUTPUT_TOKEN_S))
    whole_request: Histogram = field(default_factory=lambda: Histogram(WHOLE_REQUEST_S))

    def note_prompt(self, tokens: int, cached: int) -> None:
        """A job began."""
        self.prompt_tokens += tokens
        self.cached_tokens += cached
