"""Lets a model's calls count tokens for its recurrent states, and compute sequences one by one
whose caches cannot be batched.

mlx-lm calls a model as `model(tokens, cache=prompt_cache)`. Python looks `__call__` up in the
model's class, so it is replaced there. Calls with other caches are those of the class itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.unpaged_caches import is_list, leaves
from paged_kv.integrations.states.counted_states import CountedArraysCache, Held
from paged_kv.integrations.states.one_by_one import one_by_one
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.step_blocks import reserve
from paged_kv.steps.step_row import StepRow

# These files of mlx-lm make positions or a mask for one sequence and use them for all:
# gpt_bigcode.py, line 150, and llama4.py, line 232, of the first cache's offset as a number;
# phi3small.py, line 134, of a batch's mask, which has an axis less than the scores.
_ONE_AT_A_TIME = frozenset(
    f"mlx_lm.models.{name}" for name in ("gpt_bigcode", "llama4", "phi3small")
)

_hooked: set[type[Module]] = set()


def known_states(model: Module, layers: list[Any], model_version: int) -> list[Any]:
    """The prompt cache of a new sequence of a model without pages, in which the first cache knows
    how many tokens it holds. Caches of classes that this cannot tell stay as they are."""
    first = layers[0] if layers else None
    if type(first) is ArraysCache:
        hook_call(type(model))
        return [CountedArraysCache(len(first.cache), model_version), *layers[1:]]
    return layers


def held_by(prompt_cache: list[Any]) -> list[Held]:
    """What a prompt cache without pages holds of each sequence."""
    first = next(leaves(prompt_cache), None)
    if isinstance(first, CountedArraysCache):
        return first.held
    return [Held(None, None)]


def takes_one(model: Module, pool: PagePool) -> bool:
    """Whether sequences of a batch of paged caches are computed one after the other."""
    return bool(pool.rows) or type(model).__module__ in _ONE_AT_A_TIME


def prepare_call(model: Module, pool: PagePool) -> None:
    """Let the calls of a model with pages compute one sequence at a time if it takes no more."""
    if takes_one(model, pool):
        hook_call(type(model))


def is_separate(model: Module, prompt_cache: list[Any]) -> bool:
    """Whether a batch of such prompt caches is computed one sequence after the other."""
    first = next(leaves(prompt_cache), None)
    return isinstance(first, PagedKVCache) and takes_one(model, first.pool)


def continued(prompt_cache: list[Any], model_version: int) -> list[Any]:
    """A prompt cache that this version of the model continues."""
    first = next(leaves(prompt_cache), None)
    if isinstance(first, CountedArraysCache):
        first.set_version(model_version)
    return prompt_cache


def hook_call(kind: Any) -> None:
    """Replace a class's call; once."""
    if kind in _hooked:
        return
    stock = kind.__call__

    @wraps(stock)
    def call(model: Module, tokens: Any, *args: Any, **options: Any) -> Any:
        caches: Any = args[0] if args else options.get("cache")
        first = next(leaves(caches or ()), None)
        if isinstance(first, PagedKVCache) and takes_one(model, first.pool):
            _widen(caches, tokens.shape[0])
            if len(first.sequences) > 1:
                return _step_of_pages(partial(stock, model), tokens, caches)
        output = stock(model, tokens, *args, **options)
        if isinstance(first, CountedArraysCache):
            first.note_step(*tokens.shape)
        return output

    kind.__call__ = call
    _hooked.add(kind)


def _step_of_pages(step: Callable[..., mx.array], tokens: mx.array, caches: list[Any]) -> mx.array:
    """See `one_by_one`; each sequence's caches are views of its pages."""
    first = next(leaves(caches))
    sequences, num_tokens = first.sequences, tokens.shape[1]
    counts = [each.progress(first.layer).padding.own(num_tokens) for each in sequences]
    steps = zip(sequences, counts, strict=True)
    # Now, for all of them: a sequence that fails would leave those before it a step ahead.
    reserve(first.pool, [StepRow.next(each, first.layer, count) for each, count in steps])
    rows = [[_row_of(cache, at) for cache in caches] for at in range(len(sequences))]
    if first.pool.ranks.size > 1:
        step = partial(_computed, step)
    logits = one_by_one(step, tokens, counts, rows)
    for cache, *views in zip(leaves(caches), *map(leaves, rows), strict=True):
        cache.depend_on(views)
    return logits


def _computed(step: Callable[..., mx.array], tokens: mx.array, cache: list[Any]) -> mx.array:
    """A step that is computed at once: ranks exchange what belongs to one sequence before they
    begin with the next one, so that all do so in the same order."""
    logits = step(tokens, cache=cache)
    mx.eval([each.state for each in cache])
    return logits


def _row_of(cache: Any, row: int) -> Any:
    """A view of one sequence's pages."""
    if is_list(cache):
        return type(cache)(*[_row_of(inner, row) for inner in cache.caches])
    return type(cache)(cache.pool, cache.layer, [cache.sequences[row]])


def _widen(caches: list[Any], batch_size: int) -> None:
    """Let a new prompt cache be that of a batch."""
    for cache in leaves(caches):
        if batch_size > 1 == len(cache.sequences) and cache.empty():
            cache.batch = cache.batch.widened(batch_size)
