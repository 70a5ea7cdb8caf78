"""The limit that all slabs of a pool share, in bytes."""

from dataclasses import dataclass


@dataclass
class ByteBudget:
    """Counts mapped bytes against a limit: `0 <= mapped <= max_bytes`, at all times."""

    max_bytes: int
    mapped: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int):
            raise ValueError(f"max_bytes must be a positive integer, got {self.max_bytes!r}")
        if self.max_bytes <= 0:
            raise ValueError(f"max_bytes must be a positive integer, got {self.max_bytes}")

    @property
    def left(self) -> int:
        """Bytes that can still be mapped."""
        return self.max_bytes - self.mapped

    def take(self, nbytes: int) -> None:
        """Count `nbytes` as mapped; negative gives back."""
        assert 0 <= self.mapped + nbytes <= self.max_bytes, (nbytes, self)
        self.mapped += nbytes
