"""The text of the GPU kernels, as MLX takes it.

kernels/gpu holds what Metal and CUDA have in common, in words that kernels/metal/dialect.h and
kernels/cuda/dialect.h define. A file kernels/metal/OPERATION.metal or kernels/cuda/OPERATION.cu is
the body of a kernel, behind the file `begin` that all bodies share; MLX writes the signature.
"""

from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SUFFIXES = {"metal": "metal", "cuda": "cu"}

# Headers of each operation, in their order; each is in the dialect's folder or in kernels/gpu. Only
# CUDA has `mma`.
_ROWS = ("dialect", "pages", "rows")
HEADERS = {
    "write": (*_ROWS, "write"),
    "decode": (*_ROWS, "reading", "decode"),
    "merge": (*_ROWS, "merge"),
    "prefill": (*_ROWS, "reading", "mma", "matrices", "prefill_plan", "prefill"),
    "copy": (*_ROWS, "write", "copy"),
    "gather": (*_ROWS, "write", "gather"),
}


@cache
def header(dialect: str, operation: str) -> str:
    """What stands before the kernel."""
    paths = [header_path(dialect, name) for name in HEADERS[operation]]
    return "\n".join(path.read_text() for path in paths if path.exists()) + "\n"


def header_path(dialect: str, name: str) -> Path:
    """Where a header is."""
    own = HERE / dialect / f"{name}.h"
    return own if own.exists() else HERE / "gpu" / f"{name}.h"


# Those whose arguments are not pages.
WITHOUT_PAGES = {"merge"}


@cache
def body(dialect: str, operation: str) -> str:
    """The kernel without its signature."""
    suffix = SUFFIXES[dialect]
    names = [operation] if operation in WITHOUT_PAGES else ["begin", operation]
    parts = [HERE / dialect / f"{name}.{suffix}" for name in names]
    return "\n" + "\n".join(part.read_text() for part in parts)
