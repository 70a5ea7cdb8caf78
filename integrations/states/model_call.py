"""Lets a model's calls count tokens for its recurrent states, and compute sequences one by one
whose caches cannot be batched.

mlx-lm calls a model as `model(tokens, cache=prompt_cache)`. Python looks `__call__` up in the
model's class, so it is replaced there. Calls with other caches are those of the class itself.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from paged_kv.integrations.batching.unpaged_caches import leaves
from paged_kv.integrations.states.counted_states import CountedArraysCache, Held
from paged_kv.integrations.states.separate_sequences import SeparateSequences, one_by_one

_hooked: set[type[Module]] = set()


def known_states(model: Module, layers: list[Any], model_version: int) -> list[Any]:
    """The prompt cache of a new sequence of a model without pages, in which the first cache knows
    how many tokens it holds. Caches of classes that this cannot tell stay as they are."""
    first = layers[0] if layers else None
    if type(first) is ArraysCache:
        hook_call(type(model))
        return [CountedArraysCache(len(first.cache), model_version), *layers[1:]]
    if all(hasattr(each, "offset") and not hasattr(each, "merge") for each in layers):
        hook_call(type(model))
        return [SeparateSequences([each], [model_version]) for each in layers]
    return layers


def held_by(prompt_cache: list[Any]) -> list[Held]:
    """What a prompt cache without pages holds of each sequence."""
    first = next(leaves(prompt_cache), None)
    if isinstance(first, CountedArraysCache | SeparateSequences):
        return first.held
    return [Held(None, None)]


def is_separate(prompt_cache: list[Any]) -> bool:
    """Whether a batch of such prompt caches is computed one sequence after the other."""
    return isinstance(next(leaves(prompt_cache), None), SeparateSequences)


def continued(prompt_cache: list[Any], model_version: int) -> list[Any]:
    """A prompt cache that this version of the model continues."""
    first = next(leaves(prompt_cache), None)
    if isinstance(first, CountedArraysCache | SeparateSequences):
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
        first = caches[0] if caches else None
        if isinstance(first, SeparateSequences):
            return one_by_one(lambda row, of_row: stock(model, row, cache=of_row), tokens, caches)
        output = stock(model, tokens, *args, **options)
        if isinstance(first, CountedArraysCache):
            first.note_step(*tokens.shape)
        return output

    kind.__call__ = call
    _hooked.add(kind)
