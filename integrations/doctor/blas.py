"""Finds out which BLAS MLX computes float32 products with on a CPU, and measures it."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import mlx.core as mx

from paged_kv.openblas import INSTALL

_FUNCTION = "cblas_sgemm"
_SIZE, _REPETITIONS = 512, 3


def blas_line() -> str | None:
    """A line about the BLAS; None where MLX does not use one that could be replaced: on a GPU, and
    on a Mac."""
    if sys.platform != "linux" or mx.default_device().type != mx.cpu:
        return None
    library = _library()
    speed = f"{_flops() / 1e9:.1f} GFLOP/s in float32"
    if library is None:
        return f"BLAS of MLX: unknown, {speed}"
    if version := _openblas_version(library):
        return f"BLAS of MLX: {version}, {library}, {speed}"
    return (
        f"BLAS of MLX: {library.name}, {speed}; OpenBLAS is many times as fast for models in "
        f"float32, and commands of paged-kv use it where it is installed: {INSTALL}"
    )


class _SymbolInfo(ctypes.Structure):
    """What `dladdr` tells of an address: `Dl_info` of <dlfcn.h>."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _library() -> Path | None:
    """The file of the library that serves MLX, found as the dynamic linker finds it: first among
    those that were loaded for the whole process, then among those that `libmlx` links."""
    with suppress(AttributeError, OSError):
        return _file_of(ctypes.CDLL(None))
    with suppress(AttributeError, OSError):
        return _file_of(ctypes.CDLL("libmlx.so", mode=os.RTLD_NOLOAD))
    return None


def _file_of(scope: ctypes.CDLL) -> Path:
    """The file of the library in which a look-up of the function ends.

    Raises:
        AttributeError: no library of the scope has it.
    """
    found, dladdr = _SymbolInfo(), ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SymbolInfo)]
    dladdr(ctypes.cast(getattr(scope, _FUNCTION), ctypes.c_void_p), ctypes.byref(found))
    return Path(os.fsdecode(found.file))


def _openblas_version(library: Path) -> str | None:
    """Name and version of OpenBLAS; None of another library."""
    with suppress(AttributeError):
        config = ctypes.CDLL(str(library)).openblas_get_config
        config.restype = ctypes.c_char_p
        return " ".join(config().decode().split()[:2])
    return None


def _flops() -> float:
    """Floating-point operations a second of a product of float32 matrices, in the best of a few
    tries."""
    one, other = (mx.random.normal((_SIZE, _SIZE)) for _ in range(2))
    mx.eval(one, other)
    return 2 * _SIZE**3 / min(_seconds(one, other) for _ in range(_REPETITIONS))


def _seconds(one: mx.array, other: mx.array) -> float:
    began = perf_counter()
    mx.eval(one @ other)
    return perf_counter() - began
