"""Pages for every model of a program that mlx-lm or mlx-vlm make prompt caches for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, NamedTuple, Unpack

from mlx.nn.layers.base import Module

from paged_kv.extras import extra_module
from paged_kv.integrations.cache_library import language_model
from paged_kv.integrations.cache_options import FOR_EVERY_MODEL, CacheKeywords, CacheOptions
from paged_kv.integrations.model_version import ATTACHED
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.prompt_cache_hook import MLX_LM_HOOKS, factories_for_all
from paged_kv.integrations.servers.schedulers import SCHEDULERS, adapt
from paged_kv.integrations.version_trial import require_trusted
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.sizes import format_size


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
