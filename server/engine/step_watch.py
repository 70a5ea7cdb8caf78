"""Sees from other threads whether a step of the generation thread hangs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

# A step that takes so many times as long as the longest of the latest ones is not just a long one.
_TIMES = 20
_STEPS = 32


class StepWatch:
    """The present step.

    Args:
        timeout_s: no step hangs that has not taken longer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began: float | None = None
        self._latest: deque[float] = deque(maxlen=_STEPS)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds a step."""
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
