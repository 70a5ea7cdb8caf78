"""A variant of mlx-lm's `NaiveStreamingDetokenizer` that takes linear time for a long line.

mlx-lm's decodes the whole current line again with every token. Its other detokenizers do not.
"""

from __future__ import annotations

from typing import Any

from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, StreamingDetokenizer

# Most lines are shorter. A longer one is shortened at this length; if that fails, when it is twice
# as long, and so on.
MOST_LINE_TOKENS = 128
KEPT_TOKENS = 32
# The bytes of a character, each of which may be a token.
MOST_CHARACTER_TOKENS = 4

_UNFINISHED = "\ufffd"


class LongLineDetokenizer(NaiveStreamingDetokenizer):
    """Decodes the end of a long line only, where the text before it can no longer change.

    Args:
        tokenizer: of transformers.
    """

    def add_token(self, token: int) -> None:
        """See `StreamingDetokenizer`."""
        super().add_token(token)  # type: ignore[no-untyped-call]
        length = len(self._current_tokens)
        if length >= MOST_LINE_TOKENS and length.bit_count() == 1:
            self._shorten()

    def _shorten(self) -> None:
        """Keep only the last tokens of the line, if they decode to the same text on their own: then
        any later text is the same too.

        Tokens that begin within a character decode differently. One of four neighbouring tokens
        begins a character.
        """
        tokens: list[int] = self._current_tokens
        line: str = self._tokenizer.decode(tokens)
        for kept in range(KEPT_TOKENS, KEPT_TOKENS - MOST_CHARACTER_TOKENS, -1):
            end: str = self._tokenizer.decode(tokens[-kept:])
            # Texts of unfinished characters alone look the same wherever they begin.
            if end.rstrip(_UNFINISHED) and line.endswith(end):
                self._text += line.removesuffix(end)
                self._current_tokens = tokens[-kept:]
                return


def linear_time(detokenizer: StreamingDetokenizer) -> Any:
    """A new detokenizer of mlx-lm, or one that makes the same text in linear time."""
    if type(detokenizer) is NaiveStreamingDetokenizer:
        return LongLineDetokenizer(detokenizer._tokenizer)  # type: ignore[no-untyped-call]
    return detokenizer
