"""Says in the log where MLX multiplies matrices on a CPU many times slower than it could.

MLX's Linux wheel has no quick product of its own: float32 goes through a BLAS, and a reference one
comes with the wheel; 16 bits go through plain loops. On a machine where the reference BLAS reaches
3.1 GFLOP/s and bfloat16 3.5, OpenBLAS reaches 36 with one thread. Quantised weights use neither.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from paged_kv.kernels.pages.errors import warn_once
from paged_kv.openblas import how_to_get_openblas, library_in_use, openblas_version


def warn_of_slow_products(model: Module, *, in_command: bool = False) -> None:
    """Name what makes MLX quicker with this model: OpenBLAS; for commands of paged-kv also
    `--dtype`."""
    if sys.platform != "linux" or mx.default_device().type != mx.cpu:
        return
    dtype = _dtype_of_weights(model)
    if (in_command or dtype == "float32") and (slow := _slow_blas()):
        warn_once(
            f"MLX multiplies float32 matrices with {slow}, many times slower than OpenBLAS: "
            f"{how_to_get_openblas()}"
        )
    elif in_command and dtype in ("float16", "bfloat16"):
        warn_once(
            f"MLX multiplies {dtype} matrices slowly on a CPU: --dtype float32 reads prompts "
            "several times as fast, and takes twice the memory"
        )


def _slow_blas() -> str | None:
    """The name of the reference BLAS, if that serves MLX."""
    library = library_in_use()
    if library is None or not library.name.startswith("libblas") or openblas_version(library):
        return None
    return library.name


def _dtype_of_weights(model: Module) -> str | None:
    """The name of the format of most of a model's bytes, if it has weights of its own."""
    sizes: Counter[str] = Counter()
    of_mlx: Any = model  # its methods have no types
    weights: Any = tree_flatten(of_mlx.parameters())
    for _, weight in weights:
        sizes[str(weight.dtype).removeprefix("mlx.core.")] += weight.nbytes
    return max(sizes, key=sizes.__getitem__, default=None)
