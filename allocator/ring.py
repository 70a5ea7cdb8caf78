"""Block tables that write over what has left a window."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """Which entry of a table a block of tokens lives in.

    Attributes:
        entries: entries that are used again: block b lives where block b - entries did.
        head: entries before those, for the first blocks, which stay.
    """

    entries: int
    head: int = 0

    @property
    def size(self) -> int:
        """Entries of a full table."""
        return self.head + self.entries

    def entry(self, block: int) -> int:
        """The entry of the block-th page of tokens."""
        if block < self.head:
            return block
        return self.head + (block - self.head) % self.entries

    def held(self, last: int) -> list[int]:
        """The blocks that are in a ring whose latest is `last`, in the order of their entries."""
        oldest = max(self.head, last - self.entries + 1)
        blocks = [*range(min(self.head, last + 1)), *range(oldest, last + 1)]
        return sorted(blocks, key=self.entry)
