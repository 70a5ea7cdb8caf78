"""Lets the schedulers of Rapid-MLX and vllm-mlx keep prompts in pages.

Both derive from one project. Their `Scheduler` has a `memory_aware_cache`, whose `fetch` returns a
prompt cache and the tokens that are left to compute, and whose `store` is given tokens and a prompt
cache. They copy what they store, which would gather pages, and rebuild it without pages. Here a
factory keeps the pages themselves, within its own budget. A scheduler that looks different keeps
its own cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from paged_kv.integrations.batching.unpaged_caches import paged_caches
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.kernels.pages.errors import warn_once

SCHEDULERS = {"rapid_mlx.scheduler": "rapid-mlx 0.16.10", "vllm_mlx.scheduler": "vllm-mlx 0.6.0"}
"""The modules of schedulers, and the versions that were tested."""


def adapt(tested: str, factory_of: Callable[[Any], PagedCacheFactory | None], module: Any) -> None:
    """Let a module's new schedulers find prompts in the pages of their models' factories.

    Args:
        tested: the version that is known.
        factory_of: returns the factory of a model.
        module: that of a scheduler.
    """
    kind = getattr(module, "Scheduler", None)
    if kind is None or list(signature(kind).parameters)[:1] != ["model"]:
        _warn(tested, "there is no Scheduler of a model")
        return
    stock = kind.__init__

    def init(scheduler: Any, model: Any, *others: Any, **named: Any) -> None:
        factory = factory_of(model)
        stock(scheduler, model, *others, **named)
        if factory is not None:
            _serve(scheduler, factory, tested)

    kind.__init__ = init


def _warn(tested: str, why: str) -> None:
    warn_once(
        f"batches have pages, and no prompt starts from an earlier one: {why}, unlike in {tested}"
    )


def _serve(scheduler: Any, factory: PagedCacheFactory, tested: str) -> None:
    cache = getattr(scheduler, "memory_aware_cache", None)
    if cache is not None and all(hasattr(cache, name) for name in ("fetch", "store", "clear")):
        _answer(cache, factory)
        _keep_pages(scheduler)
        line = "prompts are kept in these pages, and no other limit of memory for them is used"
        print(f"paged-kv: {line}", file=sys.stderr)
    elif cache is not None:
        _warn(tested, "memory_aware_cache lacks fetch, store or clear")
    for name in ("block_aware_cache", "prefix_cache"):
        if getattr(scheduler, name, None) is not None:
            # It rebuilds what it stores, and would do so with copies of pages.
            setattr(scheduler, name, None)
            _warn(tested, f"options choose the {name}, which cannot keep pages: leave them out")


def _answer(cache: Any, factory: PagedCacheFactory) -> None:
    """Let a prefix cache keep what it is given in a factory's, whatever its own limits."""
    stock_clear = cache.clear

    def fetch(tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        try:
            found, known = factory.fetch_cache(tokens)
        except Exception as error:  # a request without a prefix still has its answer
            warn_once(f"prompts start from no earlier one: {error!r}")
            found, known = [], 0
        cache._last_match_type, cache._last_matched_key = ("prefix" if known else "miss"), None
        return (found, tokens[known:]) if known else (None, tokens)

    def store(tokens: list[int], kept: list[Any], *_: Any, **__: Any) -> bool:
        try:
            return bool(factory.insert_cache(tokens, kept))
        except Exception as error:  # the request is answered already
            warn_once(f"a prompt was not kept: {error!r}")
            return False

    def clear(*others: Any, **named: Any) -> Any:
        factory.clear()
        return stock_clear(*others, **named)

    cache.fetch, cache.store, cache.clear = fetch, store, clear
    # What earlier runs saved is not of pages, and would take memory that nobody looks into.
    cache.load_from_disk = lambda *_, **__: 0


def _keep_pages(scheduler: Any) -> None:
    """Let a scheduler hand all prompt caches with pages to its prefix cache, as they are."""
    for name in ("_extract_cache_states", "_reconstruct_cache_from_states"):
        stock = getattr(scheduler, name, None)
        if stock is not None:
            setattr(scheduler, name, partial(_unless_paged, stock))
    # vllm-mlx keeps no answers in caches that cannot be trimmed. Pages need not be trimmed.
    scheduler._prompt_output_entry_is_useless = lambda prompt_cache: False


def _unless_paged(convert: Callable[[Any], Any], prompt_cache: Any) -> Any:
    is_list = isinstance(prompt_cache, list)
    return prompt_cache if is_list and paged_caches(prompt_cache) else convert(prompt_cache)
