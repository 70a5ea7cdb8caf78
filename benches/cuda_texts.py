"""Assembles the whole text of the CUDA kernels, for a machine with CuPy and without MLX."""

from collections.abc import Collection
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
SLABS = 16

PRELUDE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned short uint16_t;
typedef int int32_t;
typedef const long long* Strides;  // MLX has an array of its own for them
"""
# As kernels/gpu/kernels.py has them.
OF_PAGES = [("const uint16_t*", f"slab{i}") for i in range(SLABS)]
OF_PAGES += [("const int32_t*", name) for name in ("layouts", "tables", "params", "before")]
Argument = tuple[str, str]


def _strided(*names: str) -> list[Argument]:
    kinds = (("const T*", ""), ("Strides", "_strides"))
    return [(kind, f"{name}{more}") for name in names for kind, more in kinds]


# Of the variants that the bench runs, with a step if they have the flag STEP.
def _arguments(operation: str, flags: Collection[str]) -> list[Argument]:
    done, output = ("int32_t*", "done"), ("T*", "output")
    parts = [("float*", "partials"), ("float*", "measures")]
    if operation == "write":
        return [*_strided("keys", "values"), *OF_PAGES, done]
    if operation == "merge":
        return [
            *((f"const {kind}", name) for kind, name in parts),
            ("const int32_t*", "params"),
            output,
        ]
    own = _strided("queries", *(("keys", "values") if "STEP" in flags else ()))
    return [*own, *OF_PAGES, *(parts if "PARTIAL" in flags else [output]), done]


def module(name: str) -> Any:
    """A file of kernels/gpu that needs no MLX; importing paged_kv would."""
    spec = spec_from_file_location(name, KERNELS / "gpu" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def kernel_text(operation: str, flags: Collection[str], **constants: int) -> str:
    """A whole CUDA source of one variant of an operation in float16."""
    text = module("text").kernel_text("cuda", operation, "float16", constants, flags)
    listed = ", ".join(f"{kind} {name}" for kind, name in _arguments(operation, flags))
    return (
        f"{PRELUDE}{text.header}\nusing T = paged_kv::T;\n"
        f'extern "C" __global__ void {operation}({listed}) {{{text.body}}}\n'
    )
