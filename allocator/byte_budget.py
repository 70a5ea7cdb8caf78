"""The limit that all slabs of a pool share, in bytes."""

import threading
from dataclasses import dataclass, field


def require_positive(name: str, number: int) -> None:
    """Raises a ValueError that names the number, unless it is a positive integer."""
    if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
        raise ValueError(f"{name} must be a positive integer, got {number!r}")


@dataclass
class ByteBudget:
    """Counts mapped bytes against a limit: `0 <= mapped <= max_bytes`, at all times.

    What shares a budget shares blocks' fates too, so its lock is what keeps threads apart that
    look up, insert, fork, trim and reserve.
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
        """Count `nbytes` as mapped; negative gives back."""
        assert 0 <= self.mapped + nbytes <= self.max_bytes, (nbytes, self)
        self.mapped += nbytes
