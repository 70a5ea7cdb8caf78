"""Describes the log probabilities of tokens in OpenAI's form."""

from __future__ import annotations

import functools
import math
from typing import Any

from paged_kv.integrations.server.generation.jobs import Token

# OpenAI's log probability of an impossible token: JSON has no infinity.
LEAST_LOGPROB = -9999.0


class Logprobs:
    """The descriptions of one answer's tokens.

    Args:
        tokenizer: gives the texts of tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Log probabilities name the same tokens again and again.
        self.text_of = functools.cache(self._decoded)

    def of(self, token: Token) -> dict[str, Any]:
        """A generated token and the likeliest ones in its place."""
        top = [self._described(each.token, each.logprob) for each in token.top]
        return {**self._described(token.token, token.logprob), "top_logprobs": top}

    def _described(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.text_of(token)
        # The tokenizer does not give the bytes of a token that is a part of a character.
        octets = None if "\ufffd" in text else list(text.encode())
        return {"id": token, "token": text, "bytes": octets, "logprob": bounded(logprob)}

    def _decoded(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text


def bounded(logprob: float | None) -> float | None:
    """A log probability that JSON can hold, at least LEAST_LOGPROB."""
    if logprob is None:
        return None
    return LEAST_LOGPROB if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)
