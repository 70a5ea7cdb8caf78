"""Replaces functions in the modules of a model, and nowhere else, while caches of it exist.

A module calls functions by names of its own: `scaled_dot_product_attention`, or `mx.where` where
`mx` is a name too. Here such names mean something else in the modules that a model's classes are
in, and in those of its library that they call. A module `mx` becomes a copy of the real one with
other functions. Other programs and other models never meet them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import RLock
from types import FunctionType, ModuleType
from typing import Any

from mlx.nn.layers.base import Module

_NO_MODELS = frozenset({"mlx", "builtins", "paged_kv"})
_LIBRARIES = ("mlx_lm.models.", "mlx_vlm.models.")
# Models that have nothing to do with pages use these, too.
_SHARED = frozenset({"mlx_lm.models.base", "mlx_lm.models.cache", "mlx_vlm.models.cache"})
# A finaliser may run while this thread has it.
_lock = RLock()

Names = ModuleType | type
"""What has names for functions."""


class Replacements:
    """Functions that modules call in the place of others.

    Args:
        functions: maps each function to its replacement.
    """

    def __init__(self, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        self._functions = {id(stock): (stock, each) for stock, each in functions.items()}
        self._defining = {sys.modules[stock.__module__] for stock in functions}
        self._copies: dict[ModuleType, ModuleType] = {}
        self._counts: dict[Names, int] = {}
        self._replaced: dict[Names, dict[str, tuple[Any, Any]]] = {}

    def install(self, modules: Iterable[Names]) -> Callable[[], None]:
        """Replace the functions in these modules or classes, until the returned function is called;
        where others install them too, until theirs are called as well."""
        modules = list(modules)
        with _lock:
            for module in modules:
                self._counts[module] = self._counts.get(module, 0) + 1
                if module in self._replaced:
                    continue
                replaced = self._replaced[module] = {}
                for name, value in list(vars(module).items()):
                    replacement = self._replacement(value)
                    if replacement is not None:
                        replaced[name] = value, replacement
                        setattr(module, name, replacement)
        return lambda: self._remove(modules)

    def _remove(self, modules: Iterable[Names]) -> None:
        with _lock:
            for module in modules:
                self._counts[module] -= 1
                if self._counts[module]:
                    continue
                del self._counts[module]
                for name, (stock, replacement) in self._replaced.pop(module).items():
                    if vars(module).get(name) is replacement:
                        setattr(module, name, stock)
            if not self._counts:
                self._copies.clear()

    def _replacement(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            return self._copy_of(value) if self._is_changed(value) else None
        stock, replacement = self._functions.get(id(value), (None, None))
        return replacement if stock is value else None

    def _is_changed(self, module: ModuleType) -> bool:
        """Whether the module, or one within it, defines a function that is replaced."""
        names = [each.__name__ for each in self._defining]
        within = f"{module.__name__}."
        return module in self._defining or any(each.startswith(within) for each in names)

    def _copy_of(self, module: ModuleType) -> ModuleType:
        """A module with the replacements, and with copies of the modules in it that have any."""
        if module not in self._copies:
            copy = self._copies[module] = ModuleType(module.__name__, module.__doc__)
            vars(copy).update(vars(module))
            for name, value in vars(module).items():
                replacement = self._replacement(value)
                if replacement is not None:
                    setattr(copy, name, replacement)
        return self._copies[module]


class ModelHooks:
    """What stays replaced for a model while its factory, or a sequence of it, holds this object."""

    def __init__(self) -> None:
        self._removals: dict[Any, Callable[[], None]] = {}
        weakref.finalize(self, _remove_all, self._removals).atexit = False

    def add(self, key: Any, install: Callable[[], Callable[[], None]]) -> None:
        """Replace something, once; `install` returns what puts it back."""
        if key not in self._removals:
            self._removals[key] = install()

    def remove(self, key: Any) -> None:
        """Put back what was replaced under this key, if anything was."""
        removal = self._removals.pop(key, None)
        if removal is not None:
            removal()


def _remove_all(removals: dict[Any, Callable[[], None]]) -> None:
    while removals:
        _, removal = removals.popitem()
        removal()


def modules_of(model: Module) -> list[ModuleType]:
    """The modules that a model's classes are in, and those of its library that they refer to."""
    found: dict[str, ModuleType] = {}
    waiting = {kind.__module__ for part in _parts_of(model) for kind in type(part).__mro__}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in found or name in _SHARED or name.partition(".")[0] in _NO_MODELS:
            continue
        if module is not None:
            found[name] = module
            waiting.update(each for each in _named_in(module) if each.startswith(_LIBRARIES))
    return list(found.values())


def _named_in(module: ModuleType) -> Iterator[str]:
    """The modules that the names in a module come from."""
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, FunctionType | type):
            yield value.__module__


def _parts_of(model: Module) -> Iterator[Module]:
    """The modules of a model, also of one that hides its weights in an attribute."""
    model_parts: Any = model.modules
    for part in model_parts():
        yield part
        for value in vars(part).values():
            if isinstance(value, Module):
                yield from _parts_of(value)
