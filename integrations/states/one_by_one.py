"""Computes the sequences of a step one after the other, for models that take no ragged batch.

So each gets what it would get alone, at the speed of one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def one_by_one(
    step: Callable[..., mx.array], tokens: mx.array, counts: list[int], rows: list[list[Any]]
) -> mx.array:
    """The logits of a step, [sequences, tokens, vocabulary], computed by `step(tokens, cache=)` for
    each sequence.

    Args:
        step: the model's call.
        tokens: [sequences, tokens].
        counts: how many of a sequence's tokens are not padding. Padding is not computed; its logits
            are 0.
        rows: the prompt cache of each sequence.
    """
    num_tokens = tokens.shape[1]
    found = [
        step(tokens[at : at + 1, :count], cache=rows[at]) if count else None
        for at, count in enumerate(counts)
    ]
    vocabulary = next(each for each in found if each is not None)
    return mx.concatenate([_padded(each, num_tokens, vocabulary) for each in found])


def _padded(logits: mx.array | None, num_tokens: int, like: mx.array) -> mx.array:
    if logits is None:
        return mx.zeros((1, num_tokens, like.shape[2]), like.dtype)
    missing = num_tokens - logits.shape[1]
    return mx.pad(logits, [(0, 0), (0, missing), (0, 0)]) if missing else logits
