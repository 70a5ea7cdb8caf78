"""What a block allocator tells whoever records it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_kv.allocator.block_allocator import BlockAllocator
    from paged_kv.allocator.block_table import BlockTable


class Events:
    """Is told what happens, after it has happened; this one records nothing."""

    def sized(self, allocator: BlockAllocator, block_bytes: Mapping[str, int]) -> None:
        """Blocks of these formats take so many bytes from now on."""

    def made(self, table: BlockTable) -> None:
        """A new, empty table."""

    def forked(self, table: BlockTable, fork: BlockTable) -> None:
        """A second table holds the blocks of one."""

    def written(self, table: BlockTable, start: int, end: int, fresh: int, copied: int) -> None:
        """Tokens [start, end) get rows; for that, `fresh` blocks were appended and `copied` shared
        ones were replaced by copies."""

    def trimmed(self, table: BlockTable) -> None:
        """A table holds `table.tokens` tokens from now on."""

    def dropped(self, table: BlockTable) -> None:
        """A table holds nothing any more."""

    def kept(self, allocator: BlockAllocator, block: int) -> None:
        """The prefix index holds a block, or `OutOfWindowBlocks` does."""

    def let_go(self, allocator: BlockAllocator, block: int) -> None:
        """They no longer do."""

    def moved(self, allocator: BlockAllocator, moves: Mapping[int, int]) -> None:
        """Blocks have other ids."""

    def adopted(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """A table begins with blocks that are kept; `trimmed` follows."""

    def inserted(self, table: BlockTable, num_tokens: int) -> None:
        """The prefix index knows the first tokens of a table, by the blocks of `kept`."""

    def looked_up(self, num_tokens: int, found: int) -> None:
        """A prompt was looked up in the prefix index."""


NO_EVENTS = Events()
