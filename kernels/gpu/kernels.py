"""The GPU kernels, as MLX runs them.

A kernel that reads pages takes its own arguments, then 16 slabs, of which those that are not
needed repeat the first, then what says where pages and rows are. So growing never compiles a
kernel again, and none binds more than the 31 buffers that Metal has.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from paged_kv.kernels.gpu.short_text import shortened
from paged_kv.kernels.gpu.text import WITHOUT_PAGES, kernel_text, own_words

SLABS = 16
OF_PAGES = (*(f"slab{i}" for i in range(SLABS)), "layouts", "tables", "params", "before")

# Own inputs and outputs of each operation, and the flag of the variants that have them; all have
# those without one. One that reads or writes pages also gives `done`.
INPUTS: dict[str, dict[str, str]] = {
    "write": {"keys": "", "values": ""},
    "decode": {"queries": "", "keys": "STEP", "values": "STEP", "sinks": "SINKS"},
    "merge": {"partials": "", "measures": "", "sinks": "SINKS", "params": ""},
    "prefill": {"queries": "", "tail_keys": "TAIL", "tail_values": "TAIL", "sinks": "SINKS"},
    "copy": {},
    "gather": {"tail_keys": "TAIL", "tail_values": "TAIL"},
}
OUTPUTS: dict[str, dict[str, str]] = {
    "write": {},
    "decode": {"output": "WHOLE", "partials": "PARTIAL", "measures": "PARTIAL"},
    "merge": {"output": ""},
    "prefill": {"output": ""},
    "copy": {},
    "gather": {"keys": "", "values": ""},
}

Maker = Callable[..., Any]
"""`mx.fast.metal_kernel` or `mx.fast.cuda_kernel`, or what stands for it."""

Size = tuple[int, int, int]


@dataclass(frozen=True)
class Output:
    """What a kernel gives."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


# Inputs of less than 8 elements would be another kind of argument on Metal, and another kernel.
LEAST_ELEMENTS = 8
DONE = Output((LEAST_ELEMENTS,), mx.int32)


class Launch:
    """A kernel with all that is the same in every layer but its arrays."""

    def __init__(self, kernel: Any, groups: Size, threads: int, outputs: Sequence[Output]) -> None:
        self._kernel = kernel
        self._options = {
            "grid": (groups[0] * threads, groups[1], groups[2]),
            "threadgroup": (threads, 1, 1),
            "output_shapes": [output.shape for output in outputs],
            "output_dtypes": [output.dtype for output in outputs],
        }

    def __call__(self, inputs: list[mx.array]) -> list[mx.array]:
        """The outputs. Lazy."""
        result: list[mx.array] = self._kernel(inputs=inputs, **self._options)
        return result


class GpuKernels:
    """The kernels in one dialect.

    Args:
        dialect: "metal" or "cuda".
        maker: compiles one.
    """

    def __init__(self, dialect: str, maker: Maker) -> None:
        self.dialect = dialect
        self._maker = maker
        self._made: dict[str, Any] = {}

    def kernel(
        self,
        operation: str,
        dtype: mx.Dtype,
        constants: Mapping[str, int],
        flags: Collection[str],
    ) -> Any:
        """A variant of an operation; see `gpu_text.kernel_text`."""
        number = str(dtype).rpartition(".")[2]
        parts = [operation, *sorted(flags), number, *map(str, constants.values())]
        name = "_".join(["paged_kv", *parts]).lower()
        if name not in self._made:
            self._made[name] = self._make(name, operation, number, constants, flags)
        return self._made[name]

    def _make(
        self,
        name: str,
        operation: str,
        dtype: str,
        constants: Mapping[str, int],
        flags: Collection[str],
    ) -> Any:
        inputs = [each for each, flag in INPUTS[operation].items() if not flag or flag in flags]
        outputs = [each for each, flag in OUTPUTS[operation].items() if not flag or flag in flags]
        if operation not in WITHOUT_PAGES:
            inputs, outputs = [*inputs, *OF_PAGES], [*outputs, "done"]
        text = kernel_text(self.dialect, operation, dtype, constants, flags)
        ours = own_words(self.dialect)
        header, body = shortened(text.header, text.body, ours, {*inputs, *outputs})
        return self._maker(
            name=name,
            input_names=inputs,
            output_names=outputs,
            source=body,
            header=header,
            # Or a slab might be copied, and the copy be written.
            ensure_row_contiguous=False,
        )
