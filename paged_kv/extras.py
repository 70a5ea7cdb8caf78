"""Turns a missing optional package, or a missing mlx backend, into an error that says what to
install."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


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
        raise ValueError(f"this needs the package {error.name}: {install_command(extra)}") from None


def install_command(extra: str) -> str:
    """The command that adds an extra to this package, from where the package was installed."""
    try:
        origin = json.loads(distribution("paged-kv").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    return command_from(origin, extra)


def command_from(origin: dict[str, Any], extra: str) -> str:
    """The command for an origin, as `direct_url.json` describes it (PEP 610); the empty one is an
    index."""
    url = origin.get("url", "")
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{url2pathname(urlsplit(url).path)}[{extra}]'"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install 'paged-kv[{extra}]{f' @ {url}' if url else ''}'"


# The extras of packages that commands import wherever they need them.
_EXTRAS = {"pydantic": "server", "rich": "tables", "starlette": "server", "uvicorn": "server"}


class MissingBackend(ImportError):
    """mlx has no backend on this machine; the message says which extra installs one."""


TESTED_MLX_LM = ("0.31.3", "0.32.0", "0.32.1", "0.32.2")
"""The versions of mlx-lm that .ci/check_versions has run. Others are tried where they run."""


class MLXLMChanged(ImportError):
    """mlx-lm lacks, or does otherwise, what paged_kv builds on; the message says what, and which
    versions are known to work."""

    def __init__(self, change: str) -> None:
        super().__init__(
            f"mlx-lm {version('mlx-lm')} {change}. All of paged_kv works with {TESTED_MLX_LM[-1]} "
            f"(pip install 'mlx-lm=={TESTED_MLX_LM[-1]}'); tested are {', '.join(TESTED_MLX_LM)}"
        )


@contextmanager
def missing_named() -> Iterator[None]:
    """Replace the error of an import that lacks a package by one that says what to install. On
    Linux the package mlx has no backend: its library `libmlx` comes with a separate package.

    Raises:
        ValueError: a package is not installed that an extra brings.
        MissingBackend: mlx found no `libmlx`.
        MLXLMChanged: mlx-lm has not what is imported from it.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in _EXTRAS:
            command = install_command(_EXTRAS[package])
            raise ValueError(f"this needs the package {package}: {command}") from None
        if package == "mlx_lm" and error.name != package:
            raise MLXLMChanged(f"lacks what this needs ({error})") from error
        if "libmlx" not in str(error):
            raise
        raise MissingBackend(
            f"mlx has no backend ({error}): install one with {install_command('cpu')}, or with "
            "[cuda] or [cuda13] in the place of [cpu] for an NVIDIA GPU"
        ) from None
