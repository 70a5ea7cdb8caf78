"""Replaces functions of MLX or mlx-lm in every module that imported them, and methods."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


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

    Args:
        functions: maps each function of the library to its replacement.
        methods: each class with a method that replaces the one of the same name.
    """

    def __init__(
        self,
        functions: Mapping[Callable[..., Any], Callable[..., Any]],
        methods: Sequence[tuple[type, Callable[..., Any]]],
    ) -> None:
        self._functions = functions
        self._methods = [(owner, each, getattr(owner, each.__name__)) for owner, each in methods]

    def install(self) -> None:
        """Put the replacements in their places."""
        for stock, replacement in self._functions.items():
            rebind(stock, replacement)
        for owner, replacement, _ in self._methods:
            setattr(owner, replacement.__name__, replacement)

    def remove(self) -> None:
        """Put the library's own back."""
        for stock, replacement in self._functions.items():
            rebind(replacement, stock)
        for owner, replacement, stock in self._methods:
            setattr(owner, replacement.__name__, stock)
