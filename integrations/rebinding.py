"""Putting one of mlx-lm's functions in the place of another, wherever it was imported."""

import sys
from collections.abc import Callable
from typing import Any


def rebind(function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Give `replacement` every name that `function` has in a module of mlx-lm or of others.

    Modules that are imported later get the replacement from the module that defines it. This
    package's own modules keep what they hold, or the replacement could not call the original.

    To look through all modules takes 10 ms, and is left out where the one that defines `function`
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
