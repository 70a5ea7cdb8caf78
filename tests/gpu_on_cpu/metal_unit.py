"""The text that MLX generates for a Metal kernel, and the translation unit that a CPU can run."""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.gpu_on_cpu.lint import require_metal
from tests.gpu_on_cpu.toolchain import KernelError, build, runtime_library

FLAGS = ["-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-include", "metal_prelude.h"]
FLAGS += ["-mavx2", "-mfma", "-mf16c", "-ffp-contract=off", "-fno-math-errno", "-w"]
FLAGS += ["-ftrivial-auto-var-init=pattern"]
CHECKED = ["-O1", "-gline-tables-only", "-fsanitize=thread"]
CHECKED += ["-fsanitize=bounds,shift,integer-divide-by-zero,signed-integer-overflow"]
CHECKED += ["-fsanitize=float-cast-overflow", "-fsanitize-recover=all"]
for _option in ("func-entry-exit=0", "atomics=0", "read-before-write=1"):
    CHECKED += ["-mllvm", f"-tsan-instrument-{_option}"]
FAST = ["-O2"]

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
BUFFERS = 31  # that Metal binds


def generated_text(
    kernel: Any,
    name: str,
    inputs: Sequence[mx.array],
    template: Sequence[tuple[str, Any]],
    output_dtypes: Sequence[mx.Dtype],
) -> tuple[str, str]:
    """The name that MLX gives a kernel, and its text: an exported function holds both, and needs
    no Metal."""

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
    # Strings stand behind their length, in 8 bytes.
    strings, at = [], exported.index(f"custom_kernel_{name}".encode()) - 8
    for _ in range(2):
        length = int.from_bytes(exported[at : at + 8], "little")
        strings.append(exported[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return strings[0], strings[1]


@dataclass(frozen=True)
class Unit:
    """What can be built.

    Attributes:
        buffers: names of the arguments that are memory, in their order.
    """

    text: str
    buffers: tuple[str, ...]

    def library(self, *, checked: bool) -> Path:
        """Built, with every access to memory reported or without.

        Raises:
            KernelError: it does not compile.
        """
        flags = [*FLAGS, *(CHECKED if checked else FAST)]
        return build(self.text, "clcpp", flags, [runtime_library()])


def metal_unit(text: str) -> Unit:
    """Of a text that MLX generated.

    Raises:
        KernelError: Metal would not compile it.
    """
    kernel = text.index("template", text.rindex("[[kernel]] void") - 400)
    begin = text.rindex("[[kernel]] void")
    end = text.index(") {", begin)
    parameters = [
        line.strip().rstrip(",") for line in text[begin:end].splitlines()[1:] if line.strip()
    ]
    instance = re.search(r"^template \[\[host_name.*?\]\] \[\[kernel\]\] decltype\((.*)\) \S", text, re.M)
    called = instance[1] if instance else re.search(r"void (\w+)\(", text[begin:end])[1]  # type: ignore[index]
    whole = text[: instance.start()] if instance else text
    del kernel
    source = f'# 1 "kernel"\n{_without_attributes(_with_shared_memory(whole, begin))}'
    buffers = [_name(each) for each in parameters if "[[buffer(" in each]
    if len(buffers) > BUFFERS:
        raise KernelError(f"{len(buffers)} buffers, and Metal binds {BUFFERS}")
    unit = Unit(source + _entry(called, parameters), tuple(buffers))
    require_metal(unit.text, FLAGS)
    return unit


def _name(parameter: str) -> str:
    return parameter.split("[[")[0].split()[-1].strip("*&")


def _without_attributes(text: str) -> str:
    return re.sub(r"\s*\[\[(?:kernel|buffer\(\d+\)|\w+)\]\]", "", text)


def _with_shared_memory(text: str, kernel: int) -> str:
    """Threadgroup variables of the kernel as the runtime's memory, on the same lines."""
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
