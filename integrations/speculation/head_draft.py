"""Drafts with a model's own prediction head, for all rows of a batch at once."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from paged_kv.integrations.batching.short_memory import Shortage
from paged_kv.integrations.heads.model_head import heads
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.speculation.drafts import DraftRow, within_memory


class HeadDraft:
    """Proposes the tokens that a model's head expects.

    When there is no memory for drafted tokens, nothing is drafted.

    Args:
        factory: a factory of the model, with a `head`.

    Raises:
        ValueError: it has no head.
    """

    def __init__(self, factory: PagedCacheFactory) -> None:
        head = heads.get(factory.pool)
        if head is None:
            raise ValueError(
                "the factory has no prediction head: make it with one, as "
                "PagedCacheFactory(model, head=load_head(folder))"
            )
        self._head = head

    def begin(self, salt: Hashable) -> None:
        """A row has no state: the head's pages are the sequence's."""

    def may_follow(self, state: None, tokens: list[int]) -> bool:
        """A head always has something to propose."""
        return True

    def prepare(self, rows: list[DraftRow]) -> None:
        """Nothing is missing: a head reads each step of its model."""

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        """For each row the next tokens of the head; none if there is no memory."""
        sequences = [row.sequence for row in rows if row.sequence is not None]
        last, count = [row.last for row in rows], max(row.most for row in rows)
        drafted = within_memory(partial(self._head.draft, sequences, last, count))
        if isinstance(drafted, Shortage):
            return [[] for _ in rows]
        tokens: Any = drafted.tolist()
        return [each[: row.most] for row, each in zip(rows, tokens, strict=True)]
