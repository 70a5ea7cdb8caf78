"""How long a server is left alone after a failure."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

# A failure may take as long as a time-out, half a second, during which nobody else is served. So at
# most a third of the time goes to a dead server at first, and 2 % soon.
FIRST_S, LONGEST_S = 1.0, 30.0


class Pause:
    """Doubles with each failure in a row. Threads may share it: each field is written at once.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._next_s = FIRST_S
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        """Whether to leave the server alone for now."""
        return self._clock() < self._until

    def note_failure(self) -> None:
        """Begin a pause, unless one is on: several calls may fail at once."""
        if not self.is_on:
            self._until = self._clock() + self._next_s
            self._next_s = min(2 * self._next_s, LONGEST_S)

    def note_success(self) -> None:
        """Let the next pause be short."""
        self._next_s = FIRST_S
