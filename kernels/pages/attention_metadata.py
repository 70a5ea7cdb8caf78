"""Describes a batch to the kernels: block tables, lengths and padding; and how a layer attends.

Sequences whose tables begin with the same blocks form a tree: a system prompt, then tools, then a
conversation that forked into samples. Kernels read the pages that sequences share once for all of
these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.page_format import PAGE_SIZE

Table = tuple[int, ...]


class SharedPages(NamedTuple):
    """Which sequences (rows) of a batch have pages in common.

    The tree is written as suffix arrays are: the sequences in an order in which those of every
    branch follow each other, and for each the number of pages that it shares with the one before
    it. The fewest in shared[i + 1 : j + 1] is what sequences i and j of this order share.

    Attributes:
        order: int32 [B], the rows in the order of the tree.
        shared: int32 [B], the number of first pages that row order[i] shares with row order[i - 1];
            0 for the first.
    """

    order: npt.NDArray[np.int32]
    shared: npt.NDArray[np.int32]


class BlockTables(tuple[Table, ...]):
    """The block tables of a batch, and what is derived from them.

    Both arrays are made for the first caller, and `after` hands them on from step to step.
    """

    _before: BlockTables | None = None

    def after(self, tables: Iterable[Table]) -> BlockTables:
        """The tables of the next step: this object if they are the same objects, else a new one,
        which converts only the tables that are new. O(B), about 1 microsecond for 64 rows."""
        new = BlockTables(tables)
        if len(new) != len(self):
            return new
        if all(map(is_, new, self)):
            return self
        if "array" in self.__dict__:
            new._before = self
        return new

    @cached_property
    def array(self) -> npt.NDArray[np.int32]:
        """int32 [B, entries of the longest]. Any valid entry fills up the shorter tables. Do not
        change it."""
        before, self._before = self._before, None
        shape = len(self), max(map(len, self), default=0)
        # Another filler: the one before may be a block that there is no more.
        if before is not None and before.array.shape == shape and before._filler == self._filler:
            array = before.array.copy()
            changed = [row for row, table in enumerate(self) if table is not before[row]]
        else:
            array = np.empty(shape, np.int32)
            changed = list(range(len(self)))
        for row in changed:
            table = self[row]
            array[row, : len(table)] = table
            array[row, len(table) :] = self._filler
        return array

    @cached_property
    def _filler(self) -> int:
        """The entry that fills up the shorter tables."""
        longest = max(self, key=len, default=())
        return longest[0] if longest else 0

    @cached_property
    def shared_pages(self) -> SharedPages | None:
        """Which rows share pages; None if none do. Below 20 microseconds for 64 rows, after the
        array."""
        with_blocks = [table[0] for table in self if table]
        if len(set(with_blocks)) == len(with_blocks):
            return None
        array, count = self.array, len(self)
        width, lengths = array.shape[1], np.fromiter(map(len, self), np.int32, count)
        if lengths.min() < width:
            array = np.where(np.arange(width) < lengths[:, None], array, np.int32(-1))
        # Rows in the order of their bytes: equal beginnings follow each other.
        order = np.argsort(array.view(f"V{width * array.itemsize}").ravel())
        ordered, lengths = array[order], lengths[order]
        equal = ordered[1:] == ordered[:-1]
        shared = np.zeros(count, np.int32)
        # Where no entry differs, `argmin` finds nothing: both tables are the same.
        shared[1:] = np.where(equal.all(axis=1), lengths[1:], equal.argmin(axis=1))
        return SharedPages(order.astype(np.int32), shared)


@dataclass(frozen=True, eq=False)
class Attention:
    """The arguments of a layer's attention.

    Attributes:
        scale: of scores.
        causal: whether later tokens are hidden.
        window: hides later tokens too, and tokens `window` or more positions back; None for none.
        sinks: [q_heads], logits of one more key without a value; None for none.
        softcap: scores become softcap * tanh(score / softcap), sinks stay; None for no cap.
        read_tokens: the most tokens that a query reads in steps of one token per sequence, see
            `paged_kv.kernels.pages.choice`; None for all.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    sinks: mx.array | None = None
    softcap: float | None = None
    read_tokens: int | None = None

    @property
    def hides_later(self) -> bool:
        """Whether a query sees no token behind its own."""
        return self.causal or self.window is not None


Unwritten = tuple[mx.array, mx.array]
"""Unwritten keys [B, k_heads, S, k_dim] and values [B, v_heads, S, v_dim]: the last tokens of each
sequence, counted in its length, that no page holds yet."""


def filled_key(count: int) -> str:
    """The key of `AttentionMetadata.filled_entries` in its `memo`."""
    return f"filled by {count}"


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of each sequence (row) of a batch are.

    Each sequence has S tokens in a step. Some may be padding, which no page holds: those after the
    last token (`right_padding`) and those before the first. So token i of the step is at position
    context_len + right_padding - S + i, and is padding if the sequence has no such position.

    Attributes:
        block_tables: per sequence, the table entries of its blocks in token order. Position p is
            slot p % 256 of the page of entry p // 256.
        context_lens: per sequence, the number of tokens that its table reaches, including this
            step.
        right_padding: per sequence, the number of padding tokens after the last token.
        first_tokens: per sequence, the number of tokens at the start of its table that the window
            has passed. If not zero, call attention with that window only. Empty means all zero.
        head_tokens: per sequence, the number of those that are valid all the same: sink tokens at
            the start. `gather` returns them; `attend` must not be called. Empty means all zero.
        memo: what a backend derives from this batch, by name. All layers of a step share it.
    """

    block_tables: tuple[tuple[int, ...], ...]
    context_lens: tuple[int, ...]
    right_padding: tuple[int, ...]
    first_tokens: tuple[int, ...] = ()
    head_tokens: tuple[int, ...] = ()
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def visible_lens(self) -> tuple[int, ...]:
        """Per sequence, the number of valid tokens."""
        if not self.first_tokens and not self.head_tokens:
            return self.context_lens
        return tuple(
            [sum(map(len, self.valid_ranges(row))) for row in range(len(self.context_lens))]
        )

    def valid_ranges(self, row: int) -> tuple[range, range]:
        """The valid tokens of a sequence's table: its sink tokens, and the others."""
        first = self.first_tokens[row] if self.first_tokens else 0
        head = self.head_tokens[row] if self.head_tokens else 0
        return range(head), range(first, self.context_lens[row])

    @cached_property
    def sequences(self) -> tuple[AttentionMetadata, ...]:
        """Each sequence as a batch of its own."""
        if len(self.context_lens) == 1:
            return (self,)
        lengths = self.context_lens, self.right_padding, self.first_tokens, self.head_tokens
        return tuple(
            AttentionMetadata((table,), *[each[row : row + 1] for each in lengths])
            for row, table in enumerate(self.block_tables)
        )

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Per sequence, the number of valid tokens plus the right padding."""
        has_hidden = self.first_tokens or self.head_tokens
        lens = self.visible_lens if has_hidden else self.context_lens
        return tuple(map(sum, zip(lens, self.right_padding, strict=True)))

    @cached_property
    def block_table_array(self) -> npt.NDArray[np.int32]:
        """The tables as int32 [B, entries of the longest]. Any valid entry fills up the shorter
        tables."""
        tables = self.block_tables
        return tables.array if isinstance(tables, BlockTables) else BlockTables(tables).array

    @cached_property
    def shared_pages(self) -> SharedPages | None:
        """Which sequences share pages; None if none do. Those of rings count as their own."""
        tables = self.block_tables
        if len(tables) < 2 or self.first_tokens or self.head_tokens:
            return None
        if not isinstance(tables, BlockTables):
            tables = BlockTables(tables)
        return tables.shared_pages

    def last_entries(self, count: int) -> set[int]:
        """The table entries of a step's `count` tokens."""
        return {
            entry
            for table, context_len, own in zip(
                self.block_tables, self.context_lens, self.valid_tokens(count), strict=True
            )
            if own
            for entry in table[(context_len - len(own)) // PAGE_SIZE : -(-context_len // PAGE_SIZE)]
        }

    def filled_entries(self, count: int) -> list[int]:
        """The table entries of the pages that a step of `count` tokens fills. Kept in the `memo`:
        all layers ask."""
        key = filled_key(count)
        if key not in self.memo:
            self.memo[key] = [
                entry
                for table, context_len, own in zip(
                    self.block_tables, self.context_lens, self.valid_tokens(count), strict=True
                )
                for entry in table[(context_len - len(own)) // PAGE_SIZE : context_len // PAGE_SIZE]
            ]
        filled: list[int] = self.memo[key]
        return filled

    def valid_tokens(self, count: int) -> list[range]:
        """Per sequence, which of a step's `count` tokens are valid (not padding)."""
        return [
            range(max(0, count - end), max(0, count - padding))
            for end, padding in zip(self.ends, self.right_padding, strict=True)
        ]
