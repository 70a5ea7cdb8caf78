"""Puts OpenBLAS in the place of the BLAS that MLX's Linux wheel links, and says which one serves.

The wheel links a reference BLAS, whose products of float32 matrices are many times slower. When
Python imports MLX, the dynamic linker takes each function from a library that was loaded for the
whole process, before it takes it from one that `libmlx` links: so OpenBLAS serves if it was loaded
like that before. Half precision does not use BLAS. On a Mac MLX uses Accelerate.

OpenBLAS comes from PyPI's package scipy-openblas32, whose functions have names with a prefix. The
library `libpaged_kv_blas`, of kernels/cpu/openblas_names.c, gives them the names that MLX links.
Where one of the two is missing, an OpenBLAS of the system serves.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger("paged_kv")

PACKAGE = "scipy-openblas32"
_NAMES = Path(__file__).with_name("libpaged_kv_blas.so")
# As Debian, Arch and Conda name it; Fedora's with threads; openSUSE's.
_OF_SYSTEM = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas_pthreads.so.0")
# One of the functions that MLX links.
_FUNCTION = "cblas_sgemm"
_INSTALL_OF_SYSTEM = "apt install libopenblas0-pthread, dnf install openblas, or pacman -S openblas"


@cache
def load_openblas() -> str | None:
    """Load OpenBLAS for the whole process. A program that imports paged_kv before mlx need not call
    it: it is called when `mlx.core` is imported.

    Its threads are as many as the processor's cores, or OPENBLAS_NUM_THREADS. PAGED_KV_BLAS chooses
    between PyPI's, which is the default where it is installed, the system's, and none.

    Returns:
        the name of the library that was loaded; None on a Mac, or where there is none.

    Raises:
        RuntimeError: `mlx.core` was imported before.
        ValueError: PAGED_KV_BLAS names something else.
    """
    if "mlx.core" in sys.modules:
        raise RuntimeError(
            "mlx.core is imported, and its BLAS chosen: import paged_kv, or call load_openblas, "
            "before the first import of mlx, or start the program with "
            "LD_PRELOAD=libopenblas.so.0"
        )
    if sys.platform != "linux":
        return None
    sources = {PACKAGE: _load_package, "system": _load_of_system}
    named = os.environ.get("PAGED_KV_BLAS")
    if named not in (None, "mlx", *sources):
        raise ValueError(f"PAGED_KV_BLAS={named} is unknown: set it to {PACKAGE}, system or mlx")
    loaded = (load() for name, load in sources.items() if named in (None, name))
    return next((name for name in loaded if name), None)


def how_to_get_openblas() -> str:
    """What a user does so that OpenBLAS serves MLX, in a process in which it does not."""
    named = os.environ.get("PAGED_KV_BLAS")
    if named == "mlx":
        return "leave out PAGED_KV_BLAS=mlx"
    remedy = _INSTALL_OF_SYSTEM
    if not _NAMES.exists():
        remedy = f"install a C compiler and then paged_kv again, or {remedy}"
    elif _file_of_package() is None:
        remedy = f"pip install {PACKAGE}, or {remedy}"
    elif not load_openblas.cache_info().currsize:
        return "import paged_kv before mlx"
    return f"{remedy}, or leave out PAGED_KV_BLAS={named}" if named else remedy


def _file_of_package() -> Path | None:
    spec = find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("lib") / "libscipy_openblas.so"
    return file if file.exists() else None


def _load_package() -> str | None:
    file = _file_of_package()
    if file is None or not _NAMES.exists():
        return None
    try:
        # Only libpaged_kv_blas sees it: SciPy brings an OpenBLAS whose functions have these names.
        openblas = ctypes.CDLL(str(file))
        use = ctypes.CDLL(str(_NAMES)).paged_kv_use_openblas
        use.argtypes, use.restype = [ctypes.c_void_p], ctypes.c_char_p
        if missing := use(openblas._handle):
            raise OSError(f"it lacks {missing.decode()}")
        ctypes.CDLL(str(_NAMES), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        logger.warning("%s of the package %s cannot serve MLX: %s", file.name, PACKAGE, error)
        return None
    return file.name


def _load_of_system() -> str | None:
    for name in _OF_SYSTEM:
        with suppress(OSError):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return name
    return None


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
    import mlx.core as mx

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
