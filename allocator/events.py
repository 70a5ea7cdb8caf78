"""Defines the events that an allocator reports to a recorder."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

from paged_kv.allocator.format_slabs import FormatSlabs
from paged_kv.allocator.ring import Ring


class Group(Protocol):
    """An allocator, as a recorder sees it."""

    def format_of(self, block: int) -> FormatSlabs: ...


class Table(Protocol):
    """A block table, as a recorder sees it."""

    blocks: tuple[int, ...]
    page_format: str
    first_format: str
    ring: Ring | None
    tokens: int

    @property
    def allocator(self) -> Group: ...


class Events:
    """Receives each event after it happened; this base class records nothing.

    A change that is told of has been made, so no method raises an `Exception`.
    """

    @property
    def has_stopped(self) -> bool:
        """Whether later events are lost, because one could not be recorded."""
        return False

    def sized(self, allocator: Group, block_bytes: Mapping[str, int]) -> None:
        """`block_bytes` gives the new bytes of a block of each named format."""

    def made(self, table: Table) -> None:
        """An empty table was made."""

    def forked(self, table: Table, fork: Table) -> None:
        """`fork` now shares the blocks of `table`."""

    def written(self, table: Table, start: int, end: int, fresh: int, copied: int) -> None:
        """Slots were reserved for the tokens [start, end): `fresh` blocks were appended and
        `copied` shared blocks were replaced by copies."""

    def trimmed(self, table: Table) -> None:
        """A table now holds `table.tokens` tokens."""

    def dropped(self, table: Table) -> None:
        """A table was dropped and its blocks released."""

    def kept(self, allocator: Group, block: int) -> None:
        """The prefix index or `OutOfWindowBlocks` keeps a block."""

    def evicted(self, allocator: Group, block: int) -> None:
        """The prefix index or `OutOfWindowBlocks` no longer keeps a block."""

    def moved(self, allocator: Group, moves: Mapping[int, int]) -> None:
        """The pages of blocks moved; `moves` maps old ids to new ids."""

    def adopted(self, table: Table, blocks: Sequence[int]) -> None:
        """An empty table took over cached blocks; `trimmed` follows."""

    def inserted(self, table: Table, num_tokens: int) -> None:
        """The prefix index holds the first `num_tokens` tokens of a table; `kept` named their
        blocks."""

    def looked_up(self, num_tokens: int, found: int) -> None:
        """A prompt was looked up in the prefix index."""

    def arrived(self, request: Hashable, prompt_tokens: int, max_tokens: int) -> None:
        """A request of a batch waits to begin, unless it has arrived before; it may generate at
        most `max_tokens` tokens."""

    def shares(self, request: Hashable, prompt: Sequence[int], salt: Hashable) -> None:
        """The full pages of a request's prompt are shared with prompts of the same salt that begin
        alike, if it has arrived."""

    def begun(self, request: Hashable) -> None:
        """A waiting request runs, for the first time or after it was preempted."""

    def generated(self, request: Hashable) -> None:
        """A request has generated a token."""

    def preempted(self, request: Hashable) -> None:
        """A running request waits again."""

    def ended(self, request: Hashable) -> None:
        """A request has ended, unless it is unknown or has ended before."""


NO_EVENTS = Events()
