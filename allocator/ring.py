"""Block tables that write over what has left a window."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """Which entry of a table a block of tokens lives in.

    Attributes:
        entries: entries that are used again: block b lives where block b - entries did.
        head: entries before those, for the first blocks, which stay.
        window: how many of the latest tokens are seen; None if all that are there.
        keep: how many of the first tokens are seen besides.
    """

    entries: int
    head: int = 0
    window: int | None = None
    keep: int = 0

    @property
    def size(self) -> int:
        """Entries of a full table."""
        return self.head + self.entries

    def entry(self, block: int) -> int:
        """The entry of the block-th page of tokens."""
        if block < self.head:
            return block
        return self.head + (block - self.head) % self.entries

    def rows(self, entry: int, tokens: int, page_size: int) -> tuple[int, int]:
        """Of the page of an entry, when there are so many tokens: how many rows were written, and
        how many of those are seen."""
        pages = -(-tokens // page_size)
        if entry >= pages:
            return 0, 0
        laps = (pages - 1 - entry) // self.entries if entry >= self.head else 0
        start = (entry + laps * self.entries) * page_size
        end = min(start + page_size, tokens)
        written, seen = end - start, self._seen(start, end, tokens)
        if laps:
            # Behind the newest tokens, the rows still hold those of a lap before.
            lap = self.entries * page_size
            older = end - lap, start - lap + page_size
            written += older[1] - older[0]
            seen += self._seen(*older, tokens)
        return written, seen

    def _seen(self, start: int, end: int, tokens: int) -> int:
        """How many of the positions [start, end) the next token sees."""
        first = max(0, tokens - self.window) if self.window is not None else 0
        head = max(0, min(end, self.keep) - start)
        return head + max(0, end - max(start, first, self.keep))
