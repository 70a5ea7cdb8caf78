"""Limits the bytes that all slabs of a pool map together."""

import threading
from dataclasses import dataclass, field


def require_positive(name: str, number: int) -> None:
    """Raise a ValueError with the argument's name unless `number` is a positive integer."""
    if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
        raise ValueError(f"{name} must be a positive integer, got {number!r}")


@dataclass
class ByteBudget:
    """Counts mapped bytes against a limit: `0 <= mapped <= max_bytes`, at all times.

    Allocators that share a budget also evict for each other. So the budget's lock guards
    look-ups, insertions, forks, trims and reservations from several threads.
    """

    max_bytes: int
    mapped: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_positive("max_bytes", self.max_bytes)

    @property
    def left(self) -> int:
        """Bytes that can still be mapped."""
        return self.max_bytes - self.mapped

    def take(self, nbytes: int) -> None:
        """Count `nbytes` as mapped; a negative number as unmapped."""
        assert 0 <= self.mapped + nbytes <= self.max_bytes, (nbytes, self)
        self.mapped += nbytes
