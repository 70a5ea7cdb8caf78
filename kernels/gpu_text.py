"""The text of the GPU kernels, as MLX takes it.

kernels/gpu holds what Metal and CUDA have in common, in words that kernels/metal/dialect.h and
kernels/cuda/dialect.h define. A file kernels/metal/OPERATION.metal or kernels/cuda/OPERATION.cu is
the body of a kernel, behind the file `begin` that all bodies share; MLX writes the signature.
"""

from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SUFFIXES = {"metal": "metal", "cuda": "cu"}

# Headers of each operation, in their order.
HEADERS = {
    "write": ("pages", "rows", "write"),
    "decode": ("pages", "rows", "reading", "decode"),
    "merge": ("pages", "rows", "merge"),
    "prefill": ("pages", "rows", "reading", "prefill"),
    "copy": ("pages", "rows", "write", "copy"),
    "gather": ("pages", "rows", "write", "gather"),
}


@cache
def header(dialect: str, operation: str) -> str:
    """What stands before the kernel."""
    parts = [HERE / dialect / "dialect.h"]
    for name in HEADERS[operation]:
        own = HERE / dialect / f"{name}.h"
        parts.append(own if own.exists() else HERE / "gpu" / f"{name}.h")
    return "\n".join(part.read_text() for part in parts) + "\n"


# Those whose arguments are not pages.
WITHOUT_PAGES = {"merge"}


@cache
def body(dialect: str, operation: str) -> str:
    """The kernel without its signature."""
    suffix = SUFFIXES[dialect]
    names = [operation] if operation in WITHOUT_PAGES else ["begin", operation]
    parts = [HERE / dialect / f"{name}.{suffix}" for name in names]
    return "\n" + "\n".join(part.read_text() for part in parts)
