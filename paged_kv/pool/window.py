"""Defines a sliding window and the size of the ring of pages that holds it.

A query attends to the `size` tokens that end with itself, and to the first `sink_tokens` tokens.
The pages of those, the head, are never overwritten. A ring of `entries` pages holds the last
`entries * 256` tokens after the head. It is so large that a step of at most `write_chunk` tokens
overwrites no token that its queries see:

    entries = ceil((size + write_chunk - 1) / 256)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paged_kv.allocator.ring import Ring
from paged_kv.kernels.pages.page_format import PAGE_SIZE

DEFAULT_WRITE_CHUNK = 256


@dataclass(frozen=True)
class Window:
    """The window of the layers of a group.

    Attributes:
        size: tokens that a query sees, itself included, besides the sink tokens.
        write_chunk: the longest step that is written before its queries attend.
        sink_tokens: first tokens of the sequence, which every query sees.

    Raises:
        ValueError: a number is out of its range.
    """

    size: int
    write_chunk: int
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.sink_tokens < 0:
            raise ValueError(
                f"a window needs at least 1 token and at least 0 sink tokens, got {self.size} "
                f"and {self.sink_tokens}"
            )
        if not 1 <= self.write_chunk <= self.size:
            raise ValueError(
                f"write_chunk must lie in [1, {self.size}], the window, got {self.write_chunk}: "
                "a longer step is attended to before it is written, so it needs no larger ring"
            )

    @cached_property
    def ring(self) -> Ring:
        """How block tables reuse their entries."""
        entries = -(-(self.size + self.write_chunk - 1) // PAGE_SIZE)
        return Ring(entries, -(-self.sink_tokens // PAGE_SIZE), self.size, self.sink_tokens)

    @property
    def capacity(self) -> int:
        """Tokens after the head that the ring holds."""
        return self.ring.entries * PAGE_SIZE

    @property
    def head_end(self) -> int:
        """The position after the last slot of the head's pages."""
        return self.ring.head * PAGE_SIZE

    def first_visible(self, before: int) -> int:
        """The first position inside the window of a query with `before` tokens before it."""
        return max(0, before - self.size + 1)

    def kept_parts(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of positions [start, end) that are still held after all were written."""
        head = (start, min(end, self.head_end))
        rest = (max(start, self.head_end, end - self.capacity), end)
        return [part for part in (head, rest) if part[0] < part[1]]

    def first_held(self, written: int) -> int:
        """The first position after the head that is not overwritten once `written` tokens have been
        written; 0 if none is overwritten."""
        return max(0, written - self.capacity) if written - self.head_end > self.capacity else 0

    def shortest_rollback(self, written: int) -> int:
        """The shortest length to which a sequence can be trimmed and still hold its window."""
        first_held = self.first_held(written)
        return 0 if first_held == 0 else first_held + self.size - 1
