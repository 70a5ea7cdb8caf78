"""The text of the CUDA kernels as a whole, for a machine that has CuPy and no MLX."""

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
# As kernels/gpu_kernels.py has them.
OF_PAGES = [("const uint16_t*", f"slab{i}") for i in range(SLABS)]
OF_PAGES += [("const int32_t*", name) for name in ("layouts", "tables", "params", "before")]
_QUERIES = [("const T*", "queries"), ("Strides", "queries_strides")]
_STEP = [
    (kind, f"{name}{more}")
    for name in ("keys", "values")
    for kind, more in (("const T*", ""), ("Strides", "_strides"))
]
_TAIL = [(kind, f"tail_{name}") for kind, name in _STEP]
ARGUMENTS: dict[str, list[tuple[str, str]]] = {
    "write": [*_STEP, *OF_PAGES, ("int32_t*", "done")],
    "decode": [
        *_QUERIES,
        *OF_PAGES,
        ("float*", "partials"),
        ("float*", "measures"),
        ("int32_t*", "done"),
    ],
    "merge": [
        ("const float*", "partials"),
        ("const float*", "measures"),
        ("const float*", "sinks"),
        ("const int32_t*", "params"),
        ("T*", "output"),
    ],
    "prefill": [
        *_QUERIES,
        *_TAIL,
        ("const float*", "sinks"),
        *OF_PAGES,
        ("T*", "output"),
        ("int32_t*", "done"),
    ],
}


def module(name: str) -> Any:
    """A file of kernels/ that needs no MLX; importing paged_kv would."""
    spec = spec_from_file_location(name, KERNELS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def kernel_text(operation: str, **constants: int) -> str:
    """A whole CUDA source of one operation in float16, with its constants."""
    text = module("gpu_text")
    listed = ", ".join(f"{kind} {name}" for kind, name in ARGUMENTS[operation])
    lines = "".join(f"  constexpr int {name} = {value};\n" for name, value in constants.items())
    return (
        f"{PRELUDE}{text.header('cuda', operation)}\nusing T = __half;\n"
        f'extern "C" __global__ void {operation}({listed}) {{\n{lines}'
        f"{text.body('cuda', operation)}\n}}\n"
    )
