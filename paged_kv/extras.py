"""Turns a missing optional package, or a missing mlx backend, into an error that says what to
install."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType


def extra_module(name: str, extra: str) -> ModuleType:
    """Import a module of this package that needs the packages of an extra.

    Raises:
        ValueError: a package is not installed; the message says how to install it.
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
    """mlx has no backend on this machine; the message says which extra installs one."""


@contextmanager
def backend_named() -> Iterator[None]:
    """Replace the ImportError of mlx without a backend by one that says what to install. On Linux
    the package mlx has no backend: its library `libmlx` comes with a separate package.

    Raises:
        MissingBackend: mlx found no `libmlx`.
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
