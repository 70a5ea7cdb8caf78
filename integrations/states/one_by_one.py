"""Computes the sequences of a step one after the other, for models that take no ragged batch.

So each gets what it would get alone, at the speed of one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.unpaged_caches import is_list, leaves
from paged_kv.steps.blocks import reserve

# These files of mlx-lm make positions or a mask for one sequence and use them for all:
# gpt_bigcode.py, line 150, and llama4.py, line 232, of the first cache's offset as a number;
# phi3small.py, line 134, of a batch's mask, which has an axis less than the scores.
_ONE_AT_A_TIME = frozenset(
    f"mlx_lm.models.{name}" for name in ("gpt_bigcode", "llama4", "phi3small")
)


def takes_one_at_a_time(kind: type[Module]) -> bool:
    """Whether models of a class take one sequence at a time; so do all whose caches append rows."""
    return kind.__module__ in _ONE_AT_A_TIME


def is_separate(model: Module, prompt_cache: list[Any]) -> bool:
    """Whether a batch of such prompt caches is computed one sequence after the other."""
    first = next(leaves(prompt_cache), None)
    if not isinstance(first, PagedKVCache):
        return False
    return bool(first.pool.rows) or takes_one_at_a_time(type(model))


def widen(caches: list[Any], batch_size: int) -> None:
    """Let a new prompt cache be that of a batch."""
    for cache in leaves(caches):
        if batch_size > 1 == len(cache.sequences) and cache.empty():
            cache.batch = cache.batch.widened(batch_size)


def rows_of(caches: list[Any]) -> list[list[Any]]:
    """The prompt cache of each sequence of a batch: views of the same pages."""
    count = len(next(leaves(caches)).sequences)
    return [[_row_of(cache, at) for cache in caches] for at in range(count)]


def one_by_one(
    step: Callable[..., mx.array], tokens: mx.array, caches: list[Any], rows: list[list[Any]]
) -> mx.array:
    """The logits of a step, [sequences, tokens, vocabulary], computed by `step(tokens, cache=)` for
    each sequence.

    Args:
        step: the model's call.
        tokens: [sequences, tokens]. Padding is not computed; its logits are 0.
        caches: the prompt cache of all sequences.
        rows: the one of each, see `rows_of`.

    Raises:
        PoolExhausted: the budget does not hold the step's blocks; nothing was changed.
    """
    first, num_tokens = next(leaves(caches)), tokens.shape[1]
    progress = [each.progress(first.layer) for each in first.sequences]
    counts = [each.padding.own(num_tokens) for each in progress]
    steps = zip(first.sequences, counts, strict=True)
    # Now, for all of them: what the budget does not hold is known before the first is computed.
    reserve(first.pool, [each.next_step(first.layer, count) for each, count in steps])
    if first.pool.ranks.size > 1:
        step = _computed(step)
    found = [
        step(tokens[at : at + 1, :count], cache=rows[at]) if count else None
        for at, count in enumerate(counts)
    ]
    for cache, *views in zip(leaves(caches), *map(leaves, rows), strict=True):
        cache.depend_on(views)
    vocabulary = next(each for each in found if each is not None)
    return mx.concatenate([padded(each, num_tokens, vocabulary) for each in found])


def _computed(step: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A step that is computed at once: ranks exchange what belongs to one sequence before they
    begin with the next one, so that all do so in the same order."""

    def computed(tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = step(tokens, cache=cache)
        mx.eval([each.state for each in cache])
        return logits

    return computed


def _row_of(cache: Any, row: int) -> Any:
    """A view of one sequence's pages."""
    if is_list(cache):
        return type(cache)(*[_row_of(inner, row) for inner in cache.caches])
    return type(cache)(cache.pool, cache.layer, [cache.sequences[row]])


def padded(logits: mx.array | None, num_tokens: int, like: mx.array) -> mx.array:
    """The logits of a sequence, [1, tokens, vocabulary], with zeros for padding; None if all of it
    is. `like` are those of another one."""
    if logits is None:
        return mx.zeros((1, num_tokens, like.shape[2]), like.dtype)
    missing = num_tokens - logits.shape[1]
    return mx.pad(logits, [(0, 0), (0, missing), (0, 0)]) if missing else logits
