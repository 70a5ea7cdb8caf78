"""A sliding window, and the ring of pages that holds it.

A query sees the `size` tokens that end with itself, and the first `sink_tokens` of all. Of the
tokens behind those, a ring of `entries` pages holds the last `entries * 256`: what a step of
`write_chunk` tokens overwrites, none of its queries sees.

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
    """What the layers of a group see.

    Attributes:
        size: tokens that a query sees, itself included, besides the head.
        write_chunk: the longest step that is written before it is read.
        sink_tokens: tokens at the head that every query sees.
    """

    size: int
    write_chunk: int
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.sink_tokens < 0:
            raise ValueError(
                f"a window needs at least 1 token and a head of at least 0, got {self.size} "
                f"and {self.sink_tokens}"
            )
        if not 1 <= self.write_chunk <= self.size:
            raise ValueError(
                f"write_chunk must lie in [1, {self.size}], the window, got {self.write_chunk}: "
                "a longer step is attended to before it is written, so it needs no larger ring"
            )

    @cached_property
    def ring(self) -> Ring:
        """How block tables use their entries again."""
        entries = -(-(self.size + self.write_chunk - 1) // PAGE_SIZE)
        return Ring(entries, -(-self.sink_tokens // PAGE_SIZE), self.size, self.sink_tokens)

    @property
    def capacity(self) -> int:
        """Tokens behind the head that the ring holds."""
        return self.ring.entries * PAGE_SIZE

    @property
    def head_end(self) -> int:
        """Where the pages of the head end."""
        return self.ring.head * PAGE_SIZE

    def first_visible(self, before: int) -> int:
        """The first position, of those behind the head, that a query with `before` tokens before
        it sees."""
        return max(0, before - self.size + 1)

    def kept_parts(self, start: int, end: int) -> list[tuple[int, int]]:
        """Which of the positions [start, end) are still held when all of them were written."""
        head = (start, min(end, self.head_end))
        rest = (max(start, self.head_end, end - self.capacity), end)
        return [part for part in (head, rest) if part[0] < part[1]]

    def first_held(self, written: int) -> int:
        """The first position behind the head that was not written over when `written` tokens were
        written at most."""
        return max(0, written - self.capacity) if written - self.head_end > self.capacity else 0

    def shortest_rollback(self, written: int) -> int:
        """The least length to which a sequence can be trimmed and still see its whole window."""
        first_held = self.first_held(written)
        return 0 if first_held == 0 else first_held + self.size - 1
