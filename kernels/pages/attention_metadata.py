"""A batch as the kernels see it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.page_format import PAGE_SIZE

Tail = tuple[mx.array, mx.array]
"""The keys [B, k_heads, S, k_dim] and values [B, v_heads, S, v_dim] of a step that rows count among
their tokens, as their last, and that no page holds yet."""


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of each row of a batch are.

    The rows of a step have S tokens each, but some of those may be padding, which no page holds:
    the step ends `right_padding` tokens behind a row's last token, and what lies before a row's
    first token is padding too. So token i of the step is at position
    context_len + right_padding - S + i of its row, and is padding if the row has no such position.

    Attributes:
        block_tables: per row the entries of its blocks, in the order of their tokens. Position p
            is row p % 256 of the page that entry p // 256 names.
        context_lens: per row how many tokens its table reaches, those of this step included.
        right_padding: per row how many tokens of padding follow the last one.
        first_tokens: per row how many tokens at the beginning of its table are its own no longer,
            because the window has passed them: only attention with that window may be asked for.
            Empty stands for none in any row.
        head_tokens: per row how many of those are its own all the same, the first of them: they
            are gathered, and attention must not be asked for. Empty stands for none in any row.
    """

    block_tables: tuple[tuple[int, ...], ...]
    context_lens: tuple[int, ...]
    right_padding: tuple[int, ...]
    first_tokens: tuple[int, ...] = ()
    head_tokens: tuple[int, ...] = ()

    @cached_property
    def visible_lens(self) -> tuple[int, ...]:
        """Per row the tokens that are its own."""
        return tuple(
            [sum(map(len, self.valid_ranges(row))) for row in range(len(self.context_lens))]
        )

    def valid_ranges(self, row: int) -> tuple[range, range]:
        """Which tokens of a row's table are its own: of the head, and the others."""
        first = self.first_tokens[row] if self.first_tokens else 0
        head = self.head_tokens[row] if self.head_tokens else 0
        return range(head), range(first, self.context_lens[row])

    @cached_property
    def ends_in_own(self) -> bool:
        """Whether a step of one token is no padding in any row."""
        return all(self.valid_tokens(1))

    @cached_property
    def but_latest(self) -> "AttentionMetadata":
        """The same rows without their last token, where they end in their own."""
        return replace(self, context_lens=tuple([length - 1 for length in self.context_lens]))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Per row the tokens that are its own and the padding behind them."""
        return tuple(map(sum, zip(self.visible_lens, self.right_padding, strict=True)))

    @cached_property
    def block_table_array(self) -> npt.NDArray[np.int32]:
        """The tables as int32 [rows, entries of the longest], behind shorter ones any entry of
        them."""
        longest = max(self.block_tables, key=len, default=())
        tables = np.full((len(self.block_tables), len(longest)), longest[:1] or 0, np.int32)
        for row, table in zip(tables, self.block_tables, strict=True):
            row[: len(table)] = table
        return tables

    @cached_property
    def memo(self) -> dict[str, Any]:
        """What a backend has made of these rows, under its name: all layers of a step read the
        same object."""
        return {}

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

    def valid_tokens(self, count: int) -> list[range]:
        """Which of a step's `count` tokens are not padding, for each row."""
        return [
            range(max(0, count - end), max(0, count - padding))
            for end, padding in zip(self.ends, self.right_padding, strict=True)
        ]
