"""Replaces the functions of mlx-lm that make, find and share prompt caches, for models with an
installed factory.

mlx-lm's functions that are not given a prompt cache make one with `make_prompt_cache`. Its
LRUPromptCache trims a found cache without asking how far a window can be rolled back; the
replacement handles the refusal. Its BatchGenerator computes a shared prefix once per prompt; the
replacement computes it once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import LRUPromptCache

from paged_kv.allocator.errors import RollbackError
from paged_kv.integrations.batching.preemption import PagedFactory, attach
from paged_kv.integrations.batching.shared_prefill import (
    SharedPrefill,
    Start,
    joined,
    without_first,
)
from paged_kv.integrations.rebinding import Hooks

stock_make_prompt_cache: Callable[..., list[Any]] = mlx_lm_cache.make_prompt_cache

_stock_fetch_nearest_cache = LRUPromptCache.fetch_nearest_cache
_stock_insert_segments = BatchGenerator.insert_segments


class _Installed(NamedTuple):
    """An installed factory. The reference to the model keeps its id from being reused."""

    model: Module
    factory: PagedFactory
    hooks: Hooks


# By the models' ids: models are dictionaries and cannot be keys.
_installed: dict[int, _Installed] = {}


def make_prompt_cache(model: Module, max_kv_size: int | None = None) -> list[Any]:
    """mlx-lm's function of this name; a model's installed factory makes its caches instead."""
    factory = installed_factory(model)
    if factory is not None:
        return factory.make_cache(max_kv_size)
    return stock_make_prompt_cache(model, max_kv_size)


def install_factory(model: Module, factory: PagedFactory, hooks: Hooks) -> bool:
    """Let the model's library make its prompt caches with a factory; false if it already does.

    Raises:
        ValueError: another factory is installed for this model.
    """
    before = len(_installed)
    installed = _installed.setdefault(id(model), _Installed(model, factory, hooks))
    if installed.factory is not factory:
        raise ValueError(
            "another factory is installed for this model: uninstall() it before this one"
        )
    hooks.install()
    return len(_installed) > before


def uninstall_factory(model: Module, factory: PagedFactory) -> None:
    """Undo `install_factory`; does nothing if this factory is not installed."""
    if installed_factory(model) is not factory:
        return
    hooks = _installed.pop(id(model)).hooks
    if not any(other.hooks is hooks for other in _installed.values()):
        hooks.remove()


def fetch_nearest_cache(
    prompts: LRUPromptCache, model: Any, tokens: list[int]
) -> tuple[list[Any] | None, list[int]]:
    """LRUPromptCache's method of this name, without caches that cannot be trimmed so far."""
    try:
        found, rest = _stock_fetch_nearest_cache(prompts, model, tokens)
        return found, rest
    except RollbackError:
        shorter = prompts._trie.search(model, tokens).shorter
    if not shorter:
        return None, tokens
    entry = prompts._trie.get(model, shorter)
    return copy.deepcopy(entry.prompt_cache), tokens[len(shorter) :]


def insert_segments(
    generator: BatchGenerator,
    segments: list[list[list[int]]],
    max_tokens: list[int] | None = None,
    caches: list[Any] | None = None,
    all_tokens: list[list[int]] | None = None,
    *others: Any,
    **named: Any,
) -> Any:
    """BatchGenerator's method of this name. Prompts without a cache start from their longest cached
    prefix, or from one that they share with another of the prompts."""
    factory = installed_factory(generator.model)
    if factory is None or generator.max_kv_size is not None:
        return _stock_insert_segments(
            generator, segments, max_tokens, caches, all_tokens, *others, **named
        )
    preemption = attach(generator, factory)
    # The caller may hold its caches, and give several sequences the same one: memory for their next
    # tokens is reserved in forks.
    caches = [copy.deepcopy(cache) for cache in caches or [None] * len(segments)]
    segments = list(segments)
    all_tokens = list(all_tokens or [[] for _ in segments])
    new = [at for at, cache in enumerate(caches) if cache is None and len(joined(segments[at])) > 1]
    prompts = [joined(segments[at]) for at in new]
    with mx.stream(generator.stream):
        starts = preemption.starts(prompts) if preemption else _starts(generator, factory, prompts)
    for at, prompt, start in zip(new, prompts, starts, strict=True):
        caches[at], all_tokens[at] = start.cache, prompt[: start.cached]
        segments[at] = without_first(segments[at], start.cached)
    uids = _stock_insert_segments(
        generator, segments, max_tokens, caches, all_tokens, *others, **named
    )
    if preemption is not None and not all(start.is_complete for start in starts):
        preemption.share_later([uids[at] for at in new])
    return uids


def _starts(generator: Any, factory: PagedFactory, prompts: list[list[int]]) -> list[Start]:
    """What prompts start with of a model without pages, which is never short of them."""
    step = generator.prefill_step_size
    return SharedPrefill(factory, generator.model, step, lambda *_: True).starts(prompts)


def installed_factory(model: Module) -> PagedFactory | None:
    """The factory that makes the prompt caches of this model, if one is installed."""
    installed = _installed.get(id(model))
    return None if installed is None else installed.factory


MLX_LM_HOOKS = Hooks(
    {stock_make_prompt_cache: make_prompt_cache},
    [(LRUPromptCache, fetch_nearest_cache), (BatchGenerator, insert_segments)],
)
