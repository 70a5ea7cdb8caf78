"""Replaces a function of MLX or mlx-lm in every module that imported it."""

import sys
from collections.abc import Callable
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
