"""Finds out which BLAS serves MLX in this process."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

_FUNCTION = "cblas_sgemm"


class _SymbolInfo(ctypes.Structure):
    """What `dladdr` tells of an address: `Dl_info` of <dlfcn.h>."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def library_in_use() -> Path | None:
    """The file of the library that serves MLX, found as the dynamic linker finds it: first among
    those that were loaded for the whole process, then among those that `libmlx` links. None if
    there is none."""
    with suppress(AttributeError, OSError):
        return _file_of(ctypes.CDLL(None))
    with suppress(AttributeError, OSError):
        return _file_of(ctypes.CDLL("libmlx.so", mode=os.RTLD_NOLOAD))
    return None


def openblas_version(library: Path) -> str | None:
    """Name and version of OpenBLAS, as in "OpenBLAS 0.3.30"; None of another library."""
    opened = ctypes.CDLL(str(library))
    for name in ("openblas_get_config", "scipy_openblas_get_config"):
        with suppress(AttributeError):
            config = getattr(opened, name)
            config.restype = ctypes.c_char_p
            return " ".join(config().decode().split()[:2])
    return None


def blas_name() -> str | None:
    """The BLAS that serves MLX, in a few words; None where MLX does not use one that could be
    replaced: on a GPU, and on a Mac."""
    if sys.platform != "linux" or mx.default_device().type != mx.cpu:
        return None
    library = library_in_use()
    if library is None:
        return "unknown"
    return openblas_version(library) or f"{library.name}, without OpenBLAS"


def _file_of(scope: ctypes.CDLL) -> Path:
    """The file of the library in which a look-up of the function ends.

    Raises:
        AttributeError: no library of the scope has it.
    """
    found, dladdr = _SymbolInfo(), ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SymbolInfo)]
    dladdr(ctypes.cast(getattr(scope, _FUNCTION), ctypes.c_void_p), ctypes.byref(found))
    return Path(os.fsdecode(found.file))
