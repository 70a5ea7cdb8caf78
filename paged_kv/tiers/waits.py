"""How long one prompt waits for servers, in all."""

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
