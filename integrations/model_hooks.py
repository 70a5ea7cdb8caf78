"""Replaces functions in the modules of a model, and nowhere else, while caches of it exist. `Hooks`
replace those of a library in every module that imported them.

A module calls functions by names of its own: `scaled_dot_product_attention`, or `mx.where` where
`mx` is a name too. Here such names mean something else in the modules that a model's classes are
in, and in those of its library that they call. A module `mx` becomes a copy of the real one with
other functions. Other programs and other models never meet them.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from threading import RLock
from types import FunctionType, ModuleType
from typing import Any

from mlx.nn.layers.base import Module

_NO_MODELS = frozenset({"mlx", "builtins", "paged_kv"})
_LIBRARIES = ("mlx_lm.models.", "mlx_vlm.models.")
# Models that have nothing to do with pages use these, too.
_SHARED = frozenset({"mlx_lm.models.base", "mlx_lm.models.cache", "mlx_vlm.models.cache"})
# One for all, as a finaliser may run while this thread has it.
_lock = RLock()

Names = ModuleType | type
"""What has names for functions."""

Undo = Callable[[], None]


class SharedChanges:
    """Changes that several hold: the first one makes a change, the last one undoes it."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._undo: dict[Hashable, Undo] = {}

    def hold(self, key: Hashable, change: Callable[[], Undo]) -> Undo:
        """Hold a change, which `change` makes and returns the undoing of, until the returned
        function is called, once."""
        with _lock:
            if not self._counts[key]:
                self._undo[key] = change()
            self._counts[key] += 1

        def release() -> None:
            with _lock:
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]
                    self._undo.pop(key)()

        return release


class Replacements:
    """Functions that modules call in the place of others; maps each of those to its replacement."""

    def __init__(self, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        self._functions = {id(stock): (stock, each) for stock, each in functions.items()}
        self._defining = {sys.modules[stock.__module__] for stock in functions}
        self._changes = SharedChanges()

    def install(self, modules: Iterable[Names]) -> Undo:
        """Replace the functions in these modules or classes, until the returned function is called;
        where others install them too, until theirs are called as well."""
        copies: dict[ModuleType, ModuleType] = {}
        undos = [
            self._changes.hold(module, partial(self._replace, module, copies)) for module in modules
        ]
        return partial(call_all, undos)

    def _replace(self, module: Names, copies: dict[ModuleType, ModuleType]) -> Undo:
        replaced: dict[str, tuple[Any, Any]] = {}
        for name, value in list(vars(module).items()):
            replacement = self._replacement(value, copies)
            if replacement is not None:
                replaced[name] = value, replacement
                setattr(module, name, replacement)

        def put_back() -> None:
            for name, (stock, replacement) in replaced.items():
                if vars(module).get(name) is replacement:  # nobody has changed it since
                    setattr(module, name, stock)

        return put_back

    def _replacement(self, value: Any, copies: dict[ModuleType, ModuleType]) -> Any:
        if isinstance(value, ModuleType):
            # The module, or one within it, defines a function that is replaced.
            inner, defining = f"{value.__name__}.", self._defining
            is_changed = value in defining or any(
                each.__name__.startswith(inner) for each in defining
            )
            return self._copy_of(value, copies) if is_changed else None
        stock, replacement = self._functions.get(id(value), (None, None))
        return replacement if stock is value else None

    def _copy_of(self, module: ModuleType, copies: dict[ModuleType, ModuleType]) -> ModuleType:
        """A module with the replacements, and with copies of the modules in it that have any."""
        if module not in copies:
            copy = copies[module] = ModuleType(module.__name__, module.__doc__)
            vars(copy).update(vars(module))
            self._replace(copy, copies)
        return copies[module]


def replace_call(kind: Any, call: Callable[..., Any]) -> Undo:
    """Replace a class's `__call__`, where Python looks it up, until what is returned is called."""
    own = vars(kind).get("__call__")
    kind.__call__ = call

    def put_back() -> None:
        if vars(kind).get("__call__") is not call:
            return  # somebody has replaced ours
        if own is None:
            del kind.__call__
        else:
            kind.__call__ = own

    return put_back


class ModelHooks:
    """What stays replaced for a model while its factory, or a sequence of it, holds this object."""

    def __init__(self) -> None:
        self._undo: dict[str, Undo] = {}
        weakref.finalize(self, _undo_all, self._undo).atexit = False

    def add(self, key: str, install: Callable[[], Undo]) -> None:
        """Replace something, once; `install` returns what puts it back."""
        with _lock:
            if key not in self._undo:
                self._undo[key] = install()

    def remove(self, key: str) -> None:
        """Put back what was replaced under this key, if anything was."""
        with _lock:
            undo = self._undo.pop(key, None)
            if undo is not None:
                undo()


def _undo_all(undo: dict[str, Undo]) -> None:
    with _lock:
        call_all(undo.values())


def call_all(functions: Iterable[Undo]) -> None:
    for function in functions:
        function()


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
            values = list(vars(module).values())
            named = {each.__name__ for each in values if isinstance(each, ModuleType)}
            named |= {each.__module__ for each in values if isinstance(each, FunctionType | type)}
            waiting.update(each for each in named if each.startswith(_LIBRARIES))
    return list(found.values())


def _parts_of(model: Module) -> Iterator[Module]:
    """The modules of a model, also of one that hides its weights in an attribute."""
    model_parts: Any = model.modules
    for part in model_parts():
        yield part
        for value in vars(part).values():
            if isinstance(value, Module):
                yield from _parts_of(value)


def rebind(function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Bind `replacement` to every name that `function` has in modules outside this package.

    Modules imported later get the replacement from the module that defines it. Names in this
    package's own modules keep the original, so that the replacement can call it. An attribute of
    another module, such as `mx.where`, is the replacement here too.

    Searching all modules takes 10 ms, so a call returns early if the module that defines `function`
    has the replacement already.
    """
    defining = sys.modules[function.__module__]
    if getattr(defining, function.__name__, None) is replacement:
        return
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "paged_kv":
            continue
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is function]:
            setattr(module, name, replacement)


class Hooks:
    """Replaces functions and methods of a library, and restores them; both may be repeated.

    `functions` maps each function of the library to its replacement. `methods` are classes, each
    with a method that replaces the one of the same name.
    """

    def __init__(
        self,
        functions: Mapping[Callable[..., Any], Callable[..., Any]],
        methods: Sequence[tuple[type, Callable[..., Any]]],
    ) -> None:
        self._functions = functions
        self._methods = [(owner, each, getattr(owner, each.__name__)) for owner, each in methods]

    def install(self) -> None:
        for stock, replacement in self._functions.items():
            rebind(stock, replacement)
        for owner, replacement, _ in self._methods:
            setattr(owner, replacement.__name__, replacement)

    def remove(self) -> None:
        for stock, replacement in self._functions.items():
            rebind(replacement, stock)
        for owner, replacement, stock in self._methods:
            setattr(owner, replacement.__name__, stock)
