"""Packages that only some commands need."""

from importlib import import_module
from types import ModuleType


def extra_module(name: str, extra: str) -> ModuleType:
    """A module of this package that needs the packages of an extra.

    Raises:
        ValueError: they are not installed; the message says how to get them.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("paged_kv"):
            raise
        raise ValueError(
            f"this needs the package {error.name}: pip install 'paged-kv[{extra}]'"
        ) from None
