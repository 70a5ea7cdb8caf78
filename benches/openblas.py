"""Loads OpenBLAS in the place of the BLAS that MLX's Linux wheel links; import this before mlx.

The wheel links a reference BLAS. Symbols of a library that was loaded before take precedence, and
models in float32 then run ten times faster, stock and paged alike. Half precision does not use
BLAS.
"""

import ctypes
import ctypes.util
import os
import sys

# MLX's CPU device computes on one thread, and threads of a BLAS of its own would be disturbed by
# whatever else the machine does.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
LIBRARY = ctypes.util.find_library("openblas") if sys.platform == "linux" else None
if LIBRARY:
    ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)

BLAS = (
    f"{LIBRARY} preloaded, OPENBLAS_NUM_THREADS={os.environ['OPENBLAS_NUM_THREADS']}"
    if LIBRARY
    else "the one that MLX links"
)
"""Which BLAS a bench ran with, for its results."""
