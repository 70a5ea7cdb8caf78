"""Pages for every model of a program that mlx-lm or mlx-vlm make prompt caches for.

The schedulers of Rapid-MLX and vllm-mlx derive from one project. Their `Scheduler` has a
`memory_aware_cache`, whose `fetch` returns a prompt cache and the tokens that are left to compute,
and whose `store` is given tokens and a prompt cache. They copy what they store, which would gather
pages, and rebuild it without pages. Here a factory keeps the pages themselves, within its own
budget. A scheduler that looks different keeps its own cache.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple, Unpack

from mlx.nn.layers.base import Module

from paged_kv.checks import format_size
from paged_kv.extras import extra_module
from paged_kv.integrations.batching.prompt_caches import paged_caches
from paged_kv.integrations.cache_library import language_model
from paged_kv.integrations.cache_options import FOR_EVERY_MODEL, CacheKeywords, CacheOptions
from paged_kv.integrations.model_version import ATTACHED
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.prompt_cache_hook import MLX_LM_HOOKS, factories_for_all
from paged_kv.integrations.trials import require_trusted
from paged_kv.kernels.pages.errors import warn_once

SCHEDULERS = {"rapid_mlx.scheduler": "rapid-mlx 0.16.10", "vllm_mlx.scheduler": "vllm-mlx 0.6.0"}
"""The modules of schedulers, and the versions that were tested."""


def use_pages(options: CacheOptions = FOR_EVERY_MODEL, **keywords: Unpack[CacheKeywords]) -> None:
    """Let every model have pages whose prompt caches mlx-lm or mlx-vlm make from now on.

    The first cache of a model makes its factory, which keeps finished prompts and goes with the
    model; a line on standard error names its budget. A model that cannot have pages keeps its
    library's caches, and a warning says why. Rapid-MLX and vllm-mlx find prompts in the pages
    instead of their own caches. Call it once, before models are loaded.

    Args:
        options: how caches keep their pages, each model within a budget of its own, "auto" if none
            is named.
        keywords: the options of `CacheOptions` that differ from `options`.

    Raises:
        TypeError, ValueError: an option is wrong.
        MLXLMChanged: mlx-lm is of a version that does not work with pages.

    Example:
        >>> use_pages(max_bytes="8GB")
        >>> model, tokenizer = load("mlx-community/Llama-3.2-1B-Instruct-4bit")
        >>> generate(model, tokenizer, prompt)
    """
    factories = _Factories(replace(options, **keywords))
    require_trusted(partial(PagedCacheFactory, max_bytes="64MB"))
    factories_for_all(factories.of, MLX_LM_HOOKS)
    _after_import("mlx_vlm.generate", lambda _: _hook_mlx_vlm(factories))
    for module, tested in SCHEDULERS.items():
        _after_import(module, partial(adapt, tested, factories.of))


class _Factories:
    """The factories of models, made when they are first asked for."""

    def __init__(self, options: CacheOptions) -> None:
        self._options = options
        self._lock = threading.RLock()

    def of(self, model: Any) -> PagedCacheFactory | None:
        """The factory of a model; None for one that keeps its library's caches. The model holds it,
        so that both go when the program drops the model."""
        model = language_model(model)
        with self._lock:
            attached = vars(model).get(ATTACHED)
            # A copy of a model has what was attached to the other one.
            if attached is None or attached()[0] is not model:
                _attach(model, None)  # what makes the factory asks, too
                _attach(model, self._made(model))
            factory: PagedCacheFactory | None = vars(model)[ATTACHED]()[1]
        return factory

    def _made(self, model: Module) -> PagedCacheFactory | None:
        try:
            factory = PagedCacheFactory(model, self._options)
            factory.make_cache()
        except Exception as error:  # models raise anything
            warn_once(f"{type(model).__module__} keeps its own caches: {error}")
            return None
        budget = format_size(factory.pool.budget.max_bytes)
        print(f"paged-kv: pages for {factory.pool.name}: at most {budget}", file=sys.stderr)
        return factory


def _after_import(name: str, call: Callable[[Any], object]) -> None:
    """Call a function with a module as soon as it has been imported, which may be now or never."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, call))


class _Watch(NamedTuple):
    """A finder of modules that finds one module once, as the others find it."""

    name: str
    call: Callable[[Any], object]

    def find_spec(self, name: str, path: Any, target: Any = None, /) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            stock = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                stock(module)
                self.call(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _attach(model: Module, factory: PagedCacheFactory | None) -> None:
    object.__setattr__(model, ATTACHED, lambda: (model, factory))


def _hook_mlx_vlm(factories: _Factories) -> None:
    try:
        hooks = extra_module("paged_kv.integrations.mlx_vlm.hooks", "vlm").MLX_VLM.hooks
    except (AttributeError, ImportError, ValueError) as error:
        warn_once(f"models of mlx-vlm keep its own caches: {error}")
        return
    factories_for_all(factories.of, hooks)


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
