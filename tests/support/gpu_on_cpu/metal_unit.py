"""The text that MLX generates for a Metal kernel, and the translation unit that a CPU can run."""

import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.support.gpu_on_cpu.lint import faults_of_metal
from tests.support.gpu_on_cpu.toolchain import KernelError, Unit

FLAGS = ["-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-include", "metal_prelude.h"]

IDS = {
    "thread_position_in_grid": "in_grid",
    "thread_position_in_threadgroup": "in_group",
    "threadgroup_position_in_grid": "group",
    "threads_per_threadgroup": "group_size",
    "threadgroups_per_grid": "groups",
    "thread_index_in_simdgroup": "lane",
    "simdgroup_index_in_threadgroup": "simdgroup",
    "thread_index_in_threadgroup": "index",
}
BUFFERS = 31  # Metal binds these.


def generated_text(
    kernel: Any,
    name: str,
    inputs: Sequence[mx.array],
    template: Sequence[tuple[str, Any]],
    output_dtypes: Sequence[mx.Dtype],
) -> tuple[str, str]:
    """The name that MLX gives a kernel, and its text. An exported function of MLX returns both
    without Metal."""

    def call(*arrays: mx.array) -> Any:
        return kernel(
            inputs=list(arrays),
            template=list(template) or None,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * len(output_dtypes),
            output_dtypes=list(output_dtypes),
        )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.mlxfn"
        mx.export_function(str(path), call, *inputs)
        exported = path.read_bytes()
    # Each string follows its length, which takes 8 bytes.
    strings, at = [], exported.index(f"custom_kernel_{name}".encode()) - 8
    for _ in range(2):
        length = int.from_bytes(exported[at : at + 8], "little")
        strings.append(exported[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return strings[0], strings[1]


@cache
def metal_unit(text: str) -> Unit:
    """Make the translation unit of a text that MLX generated.

    Raises:
        KernelError: Metal would not compile it.
    """
    begin = text.rindex("[[kernel]] void")
    called = text[begin:].split()[2].partition("(")[0]
    end = text.index(") {", begin)
    parameters = [line.strip().rstrip(",") for line in text[begin:end].splitlines()[1:]]
    instance = re.search(
        r"^template \[\[host_name.*?\]\] \[\[kernel\]\] decltype\((.*)\) \S", text, re.M
    )
    if instance is not None:
        called, text = instance[1], text[: instance.start()]
    source = f'# 1 "kernel"\n{_without_attributes(_with_shared_memory(text, begin))}'
    buffers = tuple(_name(each) for each in parameters if "[[buffer(" in each)
    if len(buffers) > BUFFERS:
        raise KernelError(f"{len(buffers)} buffers, and Metal binds {BUFFERS}")
    unit = Unit(source + _entry(called, parameters), "clcpp", tuple(FLAGS), buffers)
    unit.require(faults_of_metal)
    return unit


def _name(parameter: str) -> str:
    return parameter.split("[[")[0].split()[-1].strip("*&")


def _without_attributes(text: str) -> str:
    return re.sub(r"\s*\[\[\w+(?:\(\d+\))?\]\]", "", text)


def _with_shared_memory(text: str, kernel: int) -> str:
    """Put the kernel's threadgroup variables into the runtime's memory, on the same lines."""
    numbers = iter(range(1000))

    def place(found: re.Match[str]) -> str:
        dtype, name, size = found.groups()
        array = f"threadgroup {dtype} (&{name})[{size}]"
        memory = f"gpu_shared({next(numbers)}, sizeof({dtype}) * ({size}))"
        return f"{array} = *(threadgroup {dtype} (*)[{size}]){memory};"

    declaration = r"\bthreadgroup (\w+) (\w+)\[([^;]*)\];"
    return text[:kernel] + re.sub(declaration, place, text[kernel:])


def _entry(called: str, parameters: list[str]) -> str:
    """A function that takes the addresses of buffers and calls the kernel."""
    arguments = []
    buffers = 0
    for parameter in parameters:
        declared, _, attribute = parameter.partition(" [[")
        if attribute.startswith("buffer("):
            dtype = declared.rsplit(" ", 1)[0]
            if dtype.endswith("&"):
                arguments.append(f"*({dtype[:-1]}*)at[{buffers}]")
            else:
                arguments.append(f"({dtype})at[{buffers}]")
            buffers += 1
            continue
        field, dtype = IDS[attribute.strip("[]")], declared.split()[0]
        ids = f"gpu_ids()->{field}"
        whole = f"({dtype})({ids}[0], {ids}[1], {ids}[2])"
        arguments.append(whole if dtype.endswith("3") else ids)
    return (
        '\n# 1 "entry"\nextern "C" __attribute__((visibility("default"), no_sanitize("thread")))\n'
        f"void entry(const thread ulong* at) {{ {called}({', '.join(arguments)}); }}\n"
    )
