"""Computes where a sliding window's tokens live: table entries are reused as a ring."""

from dataclasses import dataclass
from typing import NamedTuple


class UsedSlots(NamedTuple):
    """A table's slots in one block, as bit sets: bit i is slot i."""

    written: int  # slots that hold a token
    live: int  # those of them that attention sees


@dataclass(frozen=True)
class Ring:
    """Maps pages of tokens to table entries."""

    entries: int  # reused ones: page b replaces page b - entries
    head: int = 0  # entries before those, for the first pages, which stay
    window: int | None = None  # latest tokens that attention sees; None for all that are held
    sink_tokens: int = 0  # first tokens that attention sees in addition

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
        """The pages that a ring holds when `last` is its latest, in the order of their entries."""
        oldest = max(self.head, last - self.entries + 1)
        blocks = [*range(min(self.head, last + 1)), *range(oldest, last + 1)]
        return sorted(blocks, key=self.entry)

    def slots(self, entry: int, tokens: int, page_size: int) -> UsedSlots:
        """The slots of an entry's page when the table has `tokens` tokens."""
        pages = -(-tokens // page_size)
        if entry >= pages:
            return UsedSlots(0, 0)
        laps = (pages - 1 - entry) // self.entries if entry >= self.head else 0
        start = (entry + laps * self.entries) * page_size
        end = min(start + page_size, tokens)
        seen = self._seen(start, end, tokens)
        if not laps:
            return UsedSlots(bits(0, end - start), seen)
        # After the newest token, the slots still hold the tokens of the lap before.
        lap = self.entries * page_size
        older = self._seen(end - lap, start - lap + page_size, tokens)
        return UsedSlots(bits(0, page_size), seen | older << (end - start))

    def _seen(self, start: int, end: int, tokens: int) -> int:
        """The positions of [start, end) that the next token sees, as bits; bit 0 is `start`."""
        first = max(0, tokens - self.window) if self.window is not None else 0
        head = bits(0, min(end, self.sink_tokens) - start)
        return head | bits(max(start, first, self.sink_tokens) - start, end - start)


def bits(first: int, last: int) -> int:
    """The integer whose bits [first, last) are set."""
    return (1 << last) - (1 << first) if first < last else 0
