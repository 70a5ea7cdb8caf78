"""Defines a draft: it proposes the tokens that a model may say next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, TypeVar

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.integrations.batching.short_memory import Shortage, attempted
from paged_kv.steps.sequence import Sequence

logger = logging.getLogger("paged_kv")

T = TypeVar("T")


class DraftRow(NamedTuple):
    """A row of a batch that asks for tokens.

    Attributes:
        state: what the draft keeps of this row, from `Draft.begin`.
        tokens: the prompt, and the tokens emitted after it. The row's own list: not to be changed.
        last: the token after these.
        most: the most tokens to propose, at least 1.
        sequence: the row's sequence of pages, which holds `tokens`; None if the model has no pages.
    """

    state: Any
    tokens: list[int]
    last: int
    most: int
    sequence: Sequence | None = None


class Draft(Protocol):
    """Proposes tokens for the rows of a batch. Several generators may share a draft."""

    def begin(self, salt: Hashable) -> Any:
        """The state of a new row. Rows with different salts must not learn from each other."""
        ...

    def may_follow(self, state: Any, tokens: list[int]) -> bool:
        """Whether the draft may have tokens to propose once the token after `tokens` is known.

        It is asked while the model still computes that token, so it must be cheap: a row for which
        nothing can be proposed does not wait for it.
        """
        ...

    def prepare(self, rows: list[DraftRow]) -> None:
        """Compute what is missing before these rows can draft, such as a prompt that the draft has
        not read."""
        ...

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        """For each row, which was prepared, the tokens that may come after `last`: at most `most`,
        or none."""
        ...


def within_memory(work: Callable[[], T]) -> T | Shortage:
    """The result of what a draft computes, or a shortage if there is no memory for it."""
    try:
        result = attempted(work)
    except PoolExhausted as error:
        result = Shortage(str(error))
    if isinstance(result, Shortage):
        logger.info("nothing is drafted: %s", result.why)
    return result
