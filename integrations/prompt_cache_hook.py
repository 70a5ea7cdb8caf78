"""Replaces the functions of mlx-lm that make, find and share prompt caches, for models with an
installed factory.

mlx-lm's functions that are not given a prompt cache make one with `make_prompt_cache`. Its
LRUPromptCache trims a found cache without asking how far a window can be rolled back; the
replacement handles the refusal. Its BatchGenerator computes a shared prefix once per prompt; the
replacement computes it once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator
from mlx_lm.generate import generate_step as _stock_generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import LRUPromptCache

from paged_kv.allocator.errors import RollbackError
from paged_kv.integrations.batching.preemption import attach
from paged_kv.integrations.batching.prompt_caches import copied_to_pages, first_paged, leaves
from paged_kv.integrations.batching.prompt_segments import joined
from paged_kv.integrations.batching.prompts import PagedFactory
from paged_kv.integrations.batching.rows import Request
from paged_kv.integrations.model_hooks import Hooks

stock_make_prompt_cache: Callable[..., list[Any]] = mlx_lm_cache.make_prompt_cache

_stock_fetch_nearest_cache = LRUPromptCache.fetch_nearest_cache
_stock_insert_segments = BatchGenerator.insert_segments
# With these options of `generate_step` a cache is the caller's, or its pages depend on more than
# the prompt's tokens.
_OF_OTHER_PAGES = ("prompt_cache", "max_kv_size", "kv_bits", "input_embeddings")


class _Installed(NamedTuple):
    """An installed factory."""

    model: Module  # so that its id is not reused
    factory: PagedFactory
    hooks: Hooks
    keeps_prompts: bool


# By the models' ids: models are dictionaries and cannot be keys.
_installed: dict[int, _Installed] = {}

# What gives a factory to every model that has none installed, and the hooks that let it.
_given_to_all: list[tuple[Callable[[Module], PagedFactory | None], Hooks]] = []


def factories_for_all(factory_of: Callable[[Module], PagedFactory | None], hooks: Hooks) -> None:
    """Let a library make the prompt caches of every model with `factory_of(model)`, where that is
    not None and no other factory is installed for it. Finished prompts are kept."""
    _given_to_all.append((factory_of, hooks))
    hooks.install()


def make_prompt_cache(model: Module, max_kv_size: int | None = None) -> list[Any]:
    """mlx-lm's function of this name; a model's installed factory makes its caches instead."""
    factory = installed_factory(model)
    if factory is not None:
        return factory.make_cache(max_kv_size)
    return stock_make_prompt_cache(model, max_kv_size)


def install_factory(
    model: Module, factory: PagedFactory, hooks: Hooks, *, keep_prompts: bool
) -> bool:
    """Let the model's library make its prompt caches with a factory; false if it already does. Once
    it is to keep prompts, it does until the factory is uninstalled.

    Raises:
        ValueError: another factory is installed for this model.
    """
    before = _installed.get(id(model))
    if before is not None and before.factory is not factory:
        raise ValueError(
            "another factory is installed for this model: uninstall() it before this one"
        )
    keeps = keep_prompts or (before is not None and before.keeps_prompts)
    _installed[id(model)] = _Installed(model, factory, hooks, keeps)
    hooks.install()
    return before is None


def uninstall_factory(model: Module, factory: PagedFactory) -> None:
    """Undo `install_factory`; does nothing if this factory is not installed."""
    if (installed := _installed.get(id(model))) is None or installed.factory is not factory:
        return
    hooks = _installed.pop(id(model)).hooks
    others = [hooks_of for _, hooks_of in _given_to_all]
    others += [each.hooks for each in _installed.values()]
    if hooks not in others:
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
    prefix, or from one that they share with another of the prompts. Where prompts are kept, those
    with an empty cache do too."""
    factory = installed_factory(generator.model)
    if factory is None or generator.max_kv_size is not None:
        return _stock_insert_segments(
            generator, segments, max_tokens, caches, all_tokens, *others, **named
        )
    preemption = attach(generator, factory)
    caches = caches or [None] * len(segments)
    keeps = keeps_prompts(generator.model)
    if keeps:
        caches = [None if each and _is_new(each, factory) else each for each in caches]
    # The caller may hold its caches, and give several sequences the same one: memory for their next
    # tokens is reserved in forks.
    caches = [
        None if cache is None else copied_to_pages(cache, factory.make_cache) for cache in caches
    ]
    segments = list(segments)
    all_tokens = list(all_tokens or [[] for _ in segments])
    new = [at for at, cache in enumerate(caches) if cache is None and len(joined(segments[at])) > 1]
    for at in new:
        caches[at] = factory.make_cache()
    uids = _stock_insert_segments(
        generator, segments, max_tokens, caches, all_tokens, *others, **named
    )
    for at in new:
        if keeps:
            preemption.requests[uids[at]] = Request(keep=factory.insert_cache)
        preemption.begin_later(uids[at])
    return uids


def _is_new(prompt_cache: list[Any], factory: PagedFactory) -> bool:
    """Whether a prompt cache is as the factory has made it: mlx-lm's server makes them itself."""
    first = first_paged(prompt_cache)
    is_ours = first is not None and first.pool is factory.pool
    return is_ours and all(each.empty() for each in leaves(prompt_cache))


def installed_factory(model: Module) -> PagedFactory | None:
    """The factory that makes the prompt caches of this model, if one is installed, or for all."""
    if (installed := _installed.get(id(model))) is not None:
        return installed.factory
    return _given_to_all[-1][0](model) if _given_to_all else None


def keeps_prompts(model: Module) -> bool:
    """Whether the model's `installed_factory` keeps finished prompts."""
    if (installed := _installed.get(id(model))) is not None:
        return installed.keeps_prompts
    return installed_factory(model) is not None


def generate_step(
    prompt: mx.array, model: Module, *others: Any, **options: Any
) -> Iterator[tuple[Any, mx.array]]:
    """mlx-lm's function of this name. Where prompts are kept, one without a cache starts from its
    longest cached prefix, and is kept once it is computed."""
    factory = installed_factory(model)
    has_other_pages = any(options.get(each) is not None for each in _OF_OTHER_PAGES)
    # Logits processors are given the tokens that are computed.
    needs_all = has_other_pages or options.get("logits_processors") or len(prompt) < 2
    if factory is None or needs_all or not keeps_prompts(model):
        return _stock_generate_step(prompt, model, *others, **options)
    return _kept(factory, prompt, model, *others, **options)


def _kept(
    factory: PagedFactory, prompt: mx.array, model: Module, *others: Any, **options: Any
) -> Iterator[tuple[Any, mx.array]]:
    tokens: Any = prompt.tolist()
    cache, cached = factory.fetch_cache(tokens)
    options["prompt_cache"] = cache
    steps = _stock_generate_step(prompt[cached:], model, *others, **options)
    for number, step in enumerate(steps):
        if not number and len(tokens) > 2:
            factory.insert_cache(tokens[:-1], cache)
        yield step


MLX_LM_HOOKS = Hooks(
    {stock_make_prompt_cache: make_prompt_cache, _stock_generate_step: generate_step},
    [(LRUPromptCache, fetch_nearest_cache), (BatchGenerator, insert_segments)],
)
