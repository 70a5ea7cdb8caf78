"""Token ids that carry the salt of who asked.

mlx-lm's server gives its prompt cache the tokens of a prompt and nothing else of a request. So the
tokens know the salt, also when they are sliced and continued.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class SaltedTokens(list[int]):
    """Token ids, and what keeps them apart from the same ones of others.

    Attributes:
        salt: what `fetch_cache` and `insert_cache` are given.
    """

    def __init__(self, tokens: Iterable[int], salt: str | None) -> None:
        super().__init__(tokens)
        self.salt = salt

    def __getitem__(self, index: Any) -> Any:
        """One token, or some with the same salt."""
        found = super().__getitem__(index)
        return SaltedTokens(found, self.salt) if isinstance(index, slice) else found


def salt_of(tokens: list[int]) -> str | None:
    """The salt of tokens that have one."""
    return tokens.salt if isinstance(tokens, SaltedTokens) else None
