"""Says which tokens end a choice, and when they may: vLLM's `stop_token_ids`, `ignore_eos` and
`min_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences


@dataclass(frozen=True)
class Ending:
    """The tokens that end the choices of a job.

    Attributes:
        stop_token_ids: tokens that end a choice beside the model's end tokens.
        ignores_end: whether the model's end tokens end nothing.
        min_tokens: no choice ends by a token or a stop text among so many first ones.
    """

    stop_token_ids: tuple[int, ...] = ()
    ignores_end: bool = False
    min_tokens: int = 0

    def tokens(self, tokenizer: Any) -> list[int]:
        """The ids of the tokens that end a choice."""
        own = () if self.ignores_end else tokenizer.eos_token_ids
        return sorted({*self.stop_token_ids, *own})

    def stop_sequences(self, tokenizer: Any) -> StopSequences:
        """The same, as mlx-lm searches for them."""
        return StopSequences([(token,) for token in self.tokens(tokenizer)] or None)

    def processors(self, tokenizer: Any, prompt_tokens: int) -> list[Any]:
        """Logits processors for a choice behind a prompt of so many tokens."""
        tokens = self.tokens(tokenizer)
        until = prompt_tokens + self.min_tokens
        return [EndsLater(tokens, until)] if self.min_tokens and tokens else []


class EndsLater:
    """One of mlx-lm's logits processors: a sequence of fewer than `until` tokens does not continue
    with one of some tokens.

    Args:
        tokens: ids; not empty.
        until: counts the prompt's tokens too.
    """

    def __init__(self, tokens: Sequence[int], until: int) -> None:
        self._tokens = mx.array(list(tokens))
        self._until = until

    def __call__(self, seen: mx.array, logits: mx.array) -> mx.array:
        if len(seen) < self._until:
            logits[..., self._tokens] = -mx.inf
        return logits
