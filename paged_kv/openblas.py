"""Puts OpenBLAS in the place of the BLAS that MLX's Linux wheel links.

The wheel links a reference BLAS, whose products of float32 matrices are many times slower. When
Python imports MLX, the dynamic linker takes each function from a library that was loaded for the
whole process, before it takes it from one that `libmlx` links: so OpenBLAS serves if it was loaded
like that before. Half precision does not use BLAS. On a Mac MLX uses Accelerate.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from functools import cache

# As Debian, Arch and Conda name it; Fedora's with threads; openSUSE's.
_NAMES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas_pthreads.so.0")

INSTALL = "apt install libopenblas0-pthread, dnf install openblas, or pacman -S openblas"
"""How OpenBLAS is installed."""


@cache
def load_openblas() -> str | None:
    """Load OpenBLAS for the whole process; call it before `mlx.core` is imported.

    Its threads are as many as the processor's cores, or OPENBLAS_NUM_THREADS.

    Returns:
        the name of the library that was loaded; None on a Mac, or where there is none.

    Raises:
        RuntimeError: `mlx.core` was imported before.
    """
    if "mlx.core" in sys.modules:
        raise RuntimeError(
            "mlx.core is imported, and its BLAS chosen: call load_openblas before the first import "
            "of mlx, or start the program with LD_PRELOAD=libopenblas.so.0"
        )
    if sys.platform == "linux":
        for name in _NAMES:
            with suppress(OSError):
                ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
                return name
    return None
