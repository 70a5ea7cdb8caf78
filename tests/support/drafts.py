"""Drafts for tests."""

from collections.abc import Hashable, Sequence

from paged_kv.integrations.speculation.drafts import DraftRow


class PlannedDraft:
    """Knows the texts that the model will write, and drafts wrong tokens where it is planned.

    Args:
        texts: prompt and greedy answer of each row.
        lengths: how many tokens to draft, by the number of tokens that are known, repeated.
        wrong_every: each so-manieth position is drafted wrong; 0 means none.
    """

    def __init__(
        self, texts: Sequence[list[int]], lengths: Sequence[int] = (4,), wrong_every: int = 0
    ) -> None:
        self._texts = texts
        self._lengths = lengths
        self._wrong_every = wrong_every

    def begin(self, salt: Hashable) -> None:
        """Rows have no state: their tokens tell which they are."""

    def may_follow(self, state: None, tokens: list[int]) -> bool:
        return True

    def prepare(self, rows: list[DraftRow]) -> None:
        """The texts are known."""

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        return [self._proposed(row) for row in rows]

    def _proposed(self, row: DraftRow) -> list[int]:
        tokens = [*row.tokens, row.last]
        known = len(tokens)
        text = next((each for each in self._texts if each[:known] == tokens), tokens)
        count = min(row.most, self._lengths[known % len(self._lengths)])
        return [
            token ^ 1 if self._wrong_every and not at % self._wrong_every else token
            for at, token in enumerate(text[known : known + count], known)
        ]
