"""Removes rejected tokens from the caches of a batch, for each row separately.

Pages are trimmed. Recurrent states cannot be: a snapshot of them is taken before the step, and for
the rows with rejected tokens the model computes their accepted tokens again from there. A snapshot
copies nothing, as a step replaces the arrays of states.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from paged_kv.allocator.errors import NotReproducible
from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.prompt_caches import (
    first_paged,
    leaves,
    paged_caches,
    replaced,
    selected,
)
from paged_kv.integrations.batching.short_memory import Shortage, attempted, make_room
from paged_kv.integrations.cache_library import model_file
from paged_kv.integrations.states.counted_states import CountedArraysCache
from paged_kv.steps.blocks import reserve

# Files of mlx-lm whose recurrent layers leave padding out of their states, as
# tests/integrations/test_zoo.py finds. In others the rows of each length take steps of their own,
# which are more steps.
_KEEP_PADDING_OUT = frozenset(
    {
        *("bailing_hybrid", "bailing_moe_v3", "falcon_h1", "gear", "granitemoehybrid", "kimi_k3"),
        *("kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe", "mamba2", "plamo2"),
        *("prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
    }
)


def require_rollback(prompt_cache: list[Any]) -> None:
    """Raises ValueError unless tokens of each row can be removed from every cache, and no cache is
    to give the bits that steps of one token give."""
    if any(each.pool.is_reproducible for each in paged_caches(prompt_cache)):
        raise NotReproducible(
            "steps that verify drafts have as many tokens as were drafted, and round otherwise "
            "than steps of one: generate without drafts, or make the factory without reproducible"
        )
    unknown = {
        type(cache).__name__
        for cache in leaves(prompt_cache)
        if not isinstance(cache, PagedKVCache | ArraysCache)
    }
    if unknown:
        raise ValueError(
            "drafts need caches that can be rolled back for each row, pages or recurrent states, "
            f"got {', '.join(sorted(unknown))}: make them with a PagedCacheFactory of this model, "
            "or install() it; models that bring caches of another kind cannot use drafts"
        )


class Rollback:
    """The caches of a batch before a step."""

    def __init__(self, model: Any, prompt_cache: list[Any]) -> None:
        self._model = model
        self._prompt_cache = prompt_cache
        self._before = {id(cache): list(cache.cache) for cache in _recurrent(prompt_cache)}
        counted = [each for each in leaves(prompt_cache) if isinstance(each, CountedArraysCache)]
        self._held = [(cache, list(cache.held)) for cache in counted]
        # All layers with pages hold as many tokens.
        first = first_paged(prompt_cache)
        self._lengths = [] if first is None else [each.length for each in first.sequences]

    def undo(self) -> None:
        """Let the caches be as before, whatever part of the step was taken."""
        self._trim(range(len(self._lengths)))
        for states in _recurrent(self._prompt_cache):
            states.finalize()  # a call that was undone left them as it began: with padding to come
            states.cache = self._before[id(states)]
        for counted, held_before in self._held:
            counted.held = list(held_before)

    def _trim(self, rows: Container[int]) -> None:
        """Remove what these rows have taken since, as far as it is not undone."""
        for cache in paged_caches(self._prompt_cache):
            held = [sequence.progress(cache.layer).tokens for sequence in cache.sequences]
            pairs = enumerate(zip(held, self._lengths, strict=True))
            taken = [now - before if row in rows else 0 for row, (now, before) in pairs]
            cache.trim_per_sequence(taken)

    def keep(self, inputs: list[list[int]], counts: list[int]) -> None:
        """Keep the first `counts[row]` tokens of each row's inputs, which the step has taken."""
        for counted, before in self._held:
            counted.keep_of_step(before, counts)
        rejected = [len(each) - count for each, count in zip(inputs, counts, strict=True)]
        rows = [row for row, count in enumerate(rejected) if count]
        if not rows:
            return
        if self._before:
            rejected = [len(inputs[row]) if row in rows else 0 for row in range(len(inputs))]
        for cache in paged_caches(self._prompt_cache):
            cache.trim_per_sequence(rejected)
        if self._before:
            accepted = {row: inputs[row][: counts[row]] for row in rows}
            again = partial(self._compute_again, accepted, len(inputs))
            if isinstance(attempted(again), Shortage):
                self._trim(rows)
                make_room()
                again()

    def _compute_again(self, accepted: dict[int, list[int]], count: int) -> None:
        """Take a step of some rows alone, from the states before, in a batch of `count` rows."""
        rows = [*accepted]

        def rows_of(cache: Any) -> Any:
            if isinstance(cache, PagedKVCache):
                return PagedKVCache(cache.pool, cache.layer, [cache.sequences[row] for row in rows])
            part = copy.copy(cache)
            part.cache = self._before[id(cache)]
            part.filter(mx.array(rows))
            return part

        caches = [replaced(cache, rows_of) for cache in self._prompt_cache]
        ragged_step(self._model, caches, [*accepted.values()])
        new_rows = {row: count + place for place, row in enumerate(rows)}
        order = mx.array([new_rows.get(row, row) for row in range(count)])
        for cache, part in zip(_recurrent(self._prompt_cache), _recurrent(caches), strict=True):
            # States are [batch, ...]; a layer may leave one out, as None.
            cache.cache = [
                None if old is None else mx.concatenate([old, new])[order]
                for old, new in zip(cache.cache, part.cache, strict=True)
            ]
        mx.eval([cache.state for cache in caches])
        mx.eval([cache.cache for cache in _recurrent(self._prompt_cache)])


def ragged_step(model: Any, prompt_cache: list[Any], inputs: list[list[int]]) -> mx.array:
    """The logits [rows, longest, vocabulary] of a step with as many tokens in each row as its
    inputs; shorter rows are padded on the right, which no cache holds.

    Raises:
        PoolExhausted: the pool does not hold the step; no cache was changed.
    """
    lengths = [len(each) for each in inputs]
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    padded = mx.array([each + [0] * more for each, more in zip(inputs, padding, strict=True)])
    if not any(padding):
        logits: mx.array = model(padded, cache=prompt_cache)
        return logits
    if _recurrent(prompt_cache) and model_file(model) not in _KEEP_PADDING_OUT:
        return _step_without_padding(model, prompt_cache, inputs)
    for cache in prompt_cache:
        cache.prepare(lengths=lengths, right_padding=padding)
    try:
        logits = model(padded, cache=prompt_cache)
    finally:
        for cache in prompt_cache:
            cache.finalize()
    return logits


def _step_without_padding(model: Any, prompt_cache: list[Any], inputs: list[list[int]]) -> mx.array:
    """See `ragged_step`; the rows of each length take a step of their own."""
    lengths = [len(each) for each in inputs]
    if (first := first_paged(prompt_cache)) is not None:
        # Now, for all rows: one that fails would leave others a step ahead.
        steps = zip(first.sequences, lengths, strict=True)
        reserve(first.pool, [each.next_step(first.layer, count) for each, count in steps])
    order: list[int] = []
    parts: list[list[Any]] = []
    found: list[mx.array] = []
    for length in sorted(set(lengths)):
        rows = [row for row, count in enumerate(lengths) if count == length]
        parts.append(selected(prompt_cache, rows))
        logits = model(mx.array([inputs[row] for row in rows]), cache=parts[-1])
        found.append(mx.pad(logits, [(0, 0), (0, max(lengths) - length), (0, 0)]))
        order += rows
    back = mx.array([order.index(row) for row in range(len(inputs))])
    for cache, *of_parts in zip(_recurrent(prompt_cache), *map(_recurrent, parts), strict=True):
        states = zip(*[part.cache for part in of_parts], strict=True)
        cache.cache = [
            None if each[0] is None else mx.concatenate(list(each))[back] for each in states
        ]
    return mx.concatenate(found)[back]


def _recurrent(prompt_cache: list[Any]) -> list[ArraysCache]:
    return [cache for cache in leaves(prompt_cache) if isinstance(cache, ArraysCache)]
