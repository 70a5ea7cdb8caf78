"""Finds the text after which a grammar begins, in a sequence's tokens."""

from __future__ import annotations

from typing import Any


class Trigger:
    """A text, such as `</think>`. Tokens may end within it, or go on behind it.

    Args:
        text: not empty.
        tokens: llguidance's tokenizer.
    """

    def __init__(self, text: str, tokens: Any) -> None:
        self._text = text.encode()
        self._tokens = tokens
        self._last = b""

    def take(self, token: int) -> list[int] | None:
        """Take the next token. If the text ends in it, returns the tokens of what the token says
        behind it."""
        said = self._last + bytes(self._tokens.decode_bytes([token]))
        _, found, rest = said.partition(self._text)
        if not found:
            self._last = said[max(0, len(said) - len(self._text) + 1) :]
            return None
        self._last = b""
        behind: list[int] = self._tokens.tokenize_bytes(rest) if rest.strip() else []
        return behind

    def before(self, tokens: list[int]) -> int:
        """How many of these tokens may come before the text ends."""
        last = self._last
        try:
            for count, token in enumerate(tokens):
                if self.take(token) is not None:
                    return count
            return len(tokens)
        finally:
            self._last = last
