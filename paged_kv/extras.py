"""Packages that only some commands need, and the backend that mlx needs."""

from collections.abc import Iterator
from contextlib import contextmanager
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


class MissingBackend(ImportError):
    """mlx has no backend on this machine; the message says which extra brings one."""


@contextmanager
def backend_named() -> Iterator[None]:
    """Turns the error of an import of mlx without a backend into one that says what to install: on
    Linux the package mlx has none, and its library `libmlx` comes with a backend.

    Raises:
        MissingBackend: instead of that.
    """
    try:
        yield
    except ImportError as error:
        if "libmlx" not in str(error):
            raise
        raise MissingBackend(
            f"mlx has no backend ({error}): install one with pip install 'paged-kv[cpu]', or with "
            "[cuda] or [cuda13] for an NVIDIA GPU (in a clone: pip install '.[cpu]')"
        ) from None
