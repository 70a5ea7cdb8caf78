"""Loads OpenBLAS, as the commands of paged-kv do: import this before mlx. Stock models in float32
run ten times faster with it too."""

import os

from paged_kv.openblas import load_openblas

# Threads of a BLAS would be disturbed by whatever else the machine does.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
LIBRARY = load_openblas()

BLAS = (
    f"{LIBRARY} preloaded, OPENBLAS_NUM_THREADS={os.environ['OPENBLAS_NUM_THREADS']}"
    if LIBRARY
    else "the one that MLX links"
)
"""Which BLAS a bench ran with, for its results."""
