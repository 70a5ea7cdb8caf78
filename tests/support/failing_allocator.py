"""Lets the n-th allocation of MLX fail, as on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import pytest

SOURCE = Path(__file__).with_suffix(".cpp")
ALL = 1 << 40


@cache
def _library() -> ctypes.CDLL:
    """The allocator whose allocations fail, in the place of MLX's."""
    compiler = shutil.which("c++")
    mlx = Path(mx.__file__).parent / "lib" / "libmlx.so"
    if sys.platform != "linux" or compiler is None or not mlx.exists():
        pytest.skip("needs MLX's CPU allocator on Linux, and a C++ compiler")
    with TemporaryDirectory() as folder:
        built = Path(folder) / "failing_allocator.so"
        flags = ["-shared", "-fPIC", "-O1", "-std=c++17"]
        subprocess.run([compiler, *flags, SOURCE, "-o", built, "-lpthread"], check=True)
        library = ctypes.CDLL(str(built))
    allocator = ctypes.CDLL(str(mlx))["_ZN3mlx4core9allocator9allocatorEv"]
    allocator.restype = ctypes.c_void_p
    library.install.argtypes = [ctypes.c_void_p]
    library.arm.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_size_t, ctypes.c_size_t]
    library.allocations.restype = ctypes.c_long
    library.install(allocator())
    return library


@contextmanager
def failing_allocations(
    after: int, many: int = 1, least: int = 0, most: int = ALL
) -> Iterator[None]:
    """Let `many` allocations of this thread fail, after so many that succeed; only those of `least`
    to `most` bytes count."""
    library = _library()
    # A freed buffer that MLX has kept would be used again without an allocation.
    mx.clear_cache()
    library.arm(after, many, least, most)
    try:
        yield
    finally:
        library.arm(0, 0, 0, 0)


@contextmanager
def counted_allocations() -> Iterator[list[int]]:
    """Count allocations; what this yields holds their number at the end."""
    counts: list[int] = []
    library = _library()
    mx.clear_cache()
    library.arm(ALL, 1, 0, ALL)
    try:
        yield counts
    finally:
        counts.append(library.allocations())
        library.arm(0, 0, 0, 0)
