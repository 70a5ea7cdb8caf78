"""How long one prompt waits for servers, in all, and how long a server is left alone after a
failure."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from time import monotonic
from typing import Any


class Patience:
    """Seconds that may be waited, in all. One thread uses it.

    Args:
        seconds: as many at first.
        clock: seconds that never go back.

    Attributes:
        left: as many now; none or fewer when all are waited.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self.left = seconds
        self._clock = clock
        self._allowed: set[str] = set()

    def allow(self, key: str, seconds: float) -> None:
        """Wait so much longer because of an entry; once, also if it is read again."""
        if key not in self._allowed:
            self._allowed.add(key)
            self.left += seconds

    def wait(self, future: Future[Any]) -> bool:
        """Wait until a future is done, or no seconds are left; whether it is done."""
        began = self._clock()
        is_done = bool(wait([future], max(0.0, self.left)).done)
        self.left -= self._clock() - began
        return is_done


class Waits:
    """The patience of one prompt: with each server, for its questions and for its entries.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._patience: dict[tuple[Hashable, str], Patience] = {}

    def asking(self, server: Hashable, seconds: float) -> Patience:
        """For all questions to a server, `seconds` together."""
        return self._patience.setdefault((server, "ask"), Patience(seconds, self._clock))

    def reading(self, server: Hashable, seconds: float) -> Patience:
        """For all entries of a server, `seconds` together and what it is allowed for each."""
        return self._patience.setdefault((server, "read"), Patience(seconds, self._clock))


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
