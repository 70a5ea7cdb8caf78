"""Checks a factory's mlx-lm arguments: models, bounds and prompt caches."""

from __future__ import annotations

from typing import Any

from mlx.nn.layers.base import Module

from paged_kv.checks import described, whole_number
from paged_kv.integrations.batching.prompt_caches import paged_caches
from paged_kv.integrations.cache_library import model_file
from paged_kv.integrations.prompt_cache_hook import stock_make_prompt_cache
from paged_kv.integrations.states.counted_states import HeldTokens, held_by
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.pool.page_pool import PagePool
from paged_kv.sizes import counted
from paged_kv.steps.sequence import Sequence


def require_model(model: object) -> None:
    """Raises TypeError unless mlx-lm can make prompt caches for the model."""
    if isinstance(model, Module) and (hasattr(model, "make_cache") or hasattr(model, "layers")):
        return
    advice = ": load() returns a model and its tokenizer" if isinstance(model, tuple) else ""
    raise TypeError(
        "model must be a model of mlx-lm, such as mlx_lm.load(path_or_repo)[0], got "
        f"{described(model)}{advice}"
    )


def used_bound(model: Module, max_kv_size: int | None) -> int | None:
    """`max_kv_size` if mlx-lm's `make_prompt_cache` would use it, else None. It ignores the bound
    for models with a `make_cache` of their own.

    Raises:
        TypeError, ValueError: `max_kv_size` is not an integer, or negative.
    """
    if max_kv_size is None:
        return None
    bound = whole_number("max_kv_size", max_kv_size, least=0)
    if not hasattr(model, "make_cache"):
        return bound
    warn_once(
        f"max_kv_size is ignored for {model_file(model)}, as in mlx-lm: the model makes its own "
        "caches. max_bytes bounds the memory of all caches"
    )
    return None


def caches_of(model: Module, prompt_cache: object) -> list[Any]:
    """Check that a prompt cache is as long as mlx-lm's for the model.

    Raises:
        TypeError: `prompt_cache` is not a list.
        ValueError: it has another length.
    """
    expected = len(stock_make_prompt_cache(model))
    if not isinstance(prompt_cache, list):
        raise TypeError(f"prompt_cache must be a list of caches, got {described(prompt_cache)}")
    if len(prompt_cache) != expected:
        raise ValueError(
            f"prompt_cache must be {expected} caches, as make_cache() makes them for this model, "
            f"got {len(prompt_cache)}"
        )
    return prompt_cache


def only_sequence(prompt_cache: list[Any], pool: PagePool, num_caches: int) -> Sequence:
    """The one sequence that all layers of a prompt cache hold.

    Raises:
        TypeError: `prompt_cache` is not a list.
        ValueError: it does not have `num_caches` caches, is of another pool, or holds several
            sequences.
    """
    if not isinstance(prompt_cache, list):
        raise TypeError(f"prompt_cache must be a list of caches, got {described(prompt_cache)}")
    caches = paged_caches(prompt_cache)
    if len(prompt_cache) != num_caches or len(caches) != pool.num_layers:
        raise ValueError(
            f"prompt_cache must be {num_caches} caches of this model, {pool.num_layers} of them "
            f"paged, got {len(prompt_cache)} and {len(caches)}: make_cache() makes such ones"
        )
    if any(cache.pool is not pool for cache in caches):
        raise ValueError(
            "prompt_cache holds pages of another factory, or was made with max_kv_size: insert "
            "what make_cache() or fetch_cache(tokens) of this factory returned"
        )
    sequences = {sequence for cache in caches for sequence in cache.sequences}
    if not pool.num_layers:
        sequences = {_with_states(pool, held) for held in held_by(prompt_cache)}
    if len(sequences) != 1:
        raise ValueError(
            f"prompt_cache must hold one sequence, got one of {len(sequences)}: extract(i) of its "
            "caches gives one sequence of a batch"
        )
    return sequences.pop()


def warn_of_states(name: str, given: int, held: int) -> None:
    """Say why nothing was kept of a prompt of `given` tokens, of a cache that holds `held`."""
    warn_once(
        f"insert_cache keeps nothing of {counted(given, 'token')}: the recurrent layers of {name} "
        "go on only where their states are known, and this cache holds those after "
        f"{counted(held, 'token')}. Insert it right after the prompt, or with all its tokens"
    )


def _with_states(pool: PagePool, held: HeldTokens) -> Sequence:
    """A sequence without pages, with the tokens of its states; none if they are not known."""
    sequence = Sequence(pool)
    sequence.model_version, sequence.prompt_states = held.model_version, held.prompt_states
    sequence.begin_at(held.num_tokens or 0, {})
    return sequence
