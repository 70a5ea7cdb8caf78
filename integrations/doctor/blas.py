"""Says which BLAS MLX computes float32 products with on a CPU, and measures it."""

from __future__ import annotations

import sys
from time import perf_counter

import mlx.core as mx

from paged_kv.blas_in_use import library_in_use, openblas_version
from paged_kv.openblas import how_to_get_openblas

_SIZE, _REPETITIONS = 512, 3


def blas_line() -> str | None:
    """A line about the BLAS; None where MLX does not use one that could be replaced: on a GPU, and
    on a Mac."""
    if sys.platform != "linux" or mx.default_device().type != mx.cpu:
        return None
    library = library_in_use()
    speed = f"{_flops() / 1e9:.1f} GFLOP/s in float32"
    if library is None:
        return f"BLAS of MLX: unknown, {speed}"
    if version := openblas_version(library):
        return f"BLAS of MLX: {version}, {library}, {speed}"
    return (
        f"BLAS of MLX: {library.name}, {speed}; OpenBLAS is many times as fast for models in "
        f"float32, and paged_kv uses it where it is installed: {how_to_get_openblas()}"
    )


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
