"""Block tables that write over what has left a window."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """Which entry of a table a block of tokens lives in.

    Attributes:
        entries: entries that are used again: block b lives where block b - entries did.
        head: entries before those, for the first blocks, which stay.
        window: how many of the latest tokens are seen; None if all that are there.
        sink_tokens: how many of the first tokens are seen besides.
    """

    entries: int
    head: int = 0
    window: int | None = None
    sink_tokens: int = 0

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

    def rows(self, entry: int, tokens: int, page_size: int) -> tuple[int, int]:
        """Of the page of an entry, when there are so many tokens: which rows were written, and
        which of those are seen; bit i is row i."""
        pages = -(-tokens // page_size)
        if entry >= pages:
            return 0, 0
        laps = (pages - 1 - entry) // self.entries if entry >= self.head else 0
        start = (entry + laps * self.entries) * page_size
        end = min(start + page_size, tokens)
        seen = self._seen(start, end, tokens)
        if not laps:
            return bits(0, end - start), seen
        # Behind the newest tokens, the rows still hold those of a lap before.
        lap = self.entries * page_size
        older = self._seen(end - lap, start - lap + page_size, tokens)
        return bits(0, page_size), seen | older << (end - start)

    def _seen(self, start: int, end: int, tokens: int) -> int:
        """Which of the positions [start, end) the next token sees; bit 0 is the first."""
        first = max(0, tokens - self.window) if self.window is not None else 0
        head = bits(0, min(end, self.sink_tokens) - start)
        return head | bits(max(start, first, self.sink_tokens) - start, end - start)


def bits(first: int, last: int) -> int:
    """The bits from the first on, up to but not the last."""
    return (1 << last) - (1 << first) if first < last else 0
