"""mlx-lm's `make_prompt_cache`, with paged caches for the models that have a factory installed.

Everything in mlx-lm that is not given a prompt cache makes one with this function. Its
LRUPromptCache trims what it finds without asking how far a cache with a window can be rolled back;
here it is told.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import LRUPromptCache

from paged_kv.allocator.errors import RollbackError
from paged_kv.integrations.rebinding import rebind

MakeCache = Callable[[int | None], list[Any]]

stock_make_prompt_cache: Callable[..., list[Any]] = mlx_lm_cache.make_prompt_cache

_stock_fetch_nearest_cache = LRUPromptCache.fetch_nearest_cache

# Models are dictionaries, which cannot be keys. Each is held here, so that its id stays its own.
_installed: dict[int, tuple[Module, MakeCache]] = {}


def make_prompt_cache(model: Module, max_kv_size: int | None = None) -> list[Any]:
    """What mlx-lm's function of this name makes, or the model's factory if it has one."""
    if id(model) in _installed:
        _, make_cache = _installed[id(model)]
        return make_cache(max_kv_size)
    return stock_make_prompt_cache(model, max_kv_size)


def install_make_cache(model: Module, make_cache: MakeCache) -> bool:
    """Let mlx-lm make this model's prompt caches with `make_cache`; false if it did already.

    Raises:
        ValueError: another function is installed for this model.
    """
    before = len(_installed)
    _, installed = _installed.setdefault(id(model), (model, make_cache))
    if installed != make_cache:
        raise ValueError(
            "another factory is installed for this model: uninstall() it before this one"
        )
    rebind(stock_make_prompt_cache, make_prompt_cache)
    _replace_fetch(fetch_nearest_cache)
    return len(_installed) > before


def uninstall_make_cache(model: Module, make_cache: MakeCache) -> None:
    """Undo `install_make_cache`; what was not installed is left as it is."""
    _, installed = _installed.get(id(model), (model, None))
    if installed == make_cache:
        del _installed[id(model)]
    if not _installed:
        rebind(make_prompt_cache, stock_make_prompt_cache)
        _replace_fetch(_stock_fetch_nearest_cache)


def _replace_fetch(function: Callable[..., Any]) -> None:
    name = _stock_fetch_nearest_cache.__name__
    setattr(LRUPromptCache, name, function)


def fetch_nearest_cache(
    prompts: LRUPromptCache, model: Any, tokens: list[int]
) -> tuple[list[Any] | None, list[int]]:
    """What LRUPromptCache's method of this name finds, without what cannot be trimmed so far."""
    try:
        found, rest = _stock_fetch_nearest_cache(prompts, model, tokens)
        return found, rest
    except RollbackError:
        shorter = prompts._trie.search(model, tokens).shorter
    if not shorter:
        return None, tokens
    entry = prompts._trie.get(model, shorter)
    return copy.deepcopy(entry.prompt_cache), tokens[len(shorter) :]
