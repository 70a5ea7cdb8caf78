"""The text that MLX generates for a CUDA kernel, and the translation unit that a CPU can run.

MLX makes no such text where it has no CUDA. What makes it is mlx/backend/cuda/custom_kernel.cpp;
here is the same for the arguments that the kernels have.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from tests.support.gpu_on_cpu.toolchain import HERE, Unit

DTYPES = {
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
    mx.uint16: "uint16_t",
    mx.int32: "int32_t",
}
NAMES = {mx.float16: "float16", mx.bfloat16: "bfloat16"}
FLAGS = ["-x", "c++", "-std=c++20", "-nostdinc++", "-I", str(HERE / "cuda_headers")]
FLAGS += ["-include", "cuda_prelude.h"]
# Stands at the beginning of a kernel; MLX puts these lines before each.
BEFORE = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""


def generated_text(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: Sequence[tuple[str, Any]],
) -> tuple[str, str]:
    """The name that MLX gives a kernel, and its text."""
    constants = [value for _, value in template]
    called = "_".join([f"custom_kernel_{name}", *(NAMES.get(c, str(c)) for c in constants)])
    parameters = []
    for each, array in inputs:
        parameters.append(f"    const {DTYPES[array.dtype]}* {each}")
        if f"{each}_strides" in source:
            parameters.append(f"    const __grid_constant__ Strides {each}_strides")
    parameters += [f"    {DTYPES[dtype]}* {each}" for each, dtype in outputs]
    lines = [
        f"  constexpr int {each} = {value};"
        if isinstance(value, int)
        else f"  using {each} = {DTYPES[value]};"
        for each, value in template
    ]
    text = f"{BEFORE}{header}namespace mlx::core::cu {{\n\n__global__ void {called}(\n"
    text += ",\n".join(parameters) + ") {\n" + "\n".join(lines) + f"\n\n{source}\n}}\n\n"
    return called, text + "} // namespace mlx::core::cu\n"


@cache
def cuda_unit(text: str) -> Unit:
    """Make the translation unit of such a text."""
    begin = text.rindex("__global__ void")
    end = text.index(") {", begin)
    called, _, listed = text[begin:end].removeprefix("__global__ void ").partition("(\n")
    parameters = [line.strip().rstrip(",") for line in listed.splitlines()]
    arguments = [
        f"*({each.split()[-2]}*)at[{i}]" if "__grid_constant__" in each else _pointer(each, i)
        for i, each in enumerate(parameters)
    ]
    source = f'# 1 "kernel"\n{_without_instructions(_with_shared_memory(text))}'
    if source.count("mma_on_cpu"):
        source = f'# 1 "mma"\n{(HERE / "mma_on_cpu.h").read_text()}{source}'
    entry = (
        '\n# 1 "entry"\nextern "C" __attribute__((visibility("default"), no_sanitize("thread")))\n'
        "void entry(const uint64_t* at) { using namespace mlx::core::cu; "
        f"{called}({', '.join(arguments)}); }}\n"
    )
    return Unit(source + entry, "cpp", tuple(FLAGS), tuple(each.split()[-1] for each in parameters))


def _pointer(parameter: str, number: int) -> str:
    return f"({parameter.rsplit(' ', 1)[0]})at[{number}]"


def _without_instructions(text: str) -> str:
    """Replace the one instruction that no CPU has by a function, on the same lines."""

    def call(found: re.Match[str]) -> str:
        dtype = "__nv_bfloat16" if ".bf16." in found[0] else "__half"
        operands = ", ".join(re.findall(r"\(([\w.]+)\[0\]\)", found[0]))
        return f"mma_on_cpu<{dtype}>({operands});" + "\n" * found[0].count("\n")

    return re.sub(r"asm volatile\(.*?\);", call, text, flags=re.DOTALL)


def _with_shared_memory(text: str) -> str:
    """Put shared variables into the runtime's memory, on the same lines."""
    numbers = iter(range(1000))

    def place(found: re.Match[str]) -> str:
        dtype, name, size = found.groups()
        memory = f"gpu_shared({next(numbers)}, sizeof({dtype}) * ({size}))"
        return f"{dtype} (&{name})[{size}] = *({dtype} (*)[{size}]){memory};"

    return re.sub(r"\b__shared__ (\w+) (\w+)\[([^;]*)\];", place, text)
