"""The GPU kernels, as MLX runs them.

A kernel that reads pages takes its own arguments, then 16 slabs, of which those that are not
needed repeat the first, then what says where pages and rows are. So growing never compiles a
kernel again, and none binds more than the 31 buffers that Metal has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from paged_kv.kernels.gpu_text import WITHOUT_PAGES, body, header

SLABS = 16
OF_PAGES = (*(f"slab{i}" for i in range(SLABS)), "layouts", "tables", "params", "before")

# Own inputs and outputs of each operation. One that reads or writes pages also gives `done`.
ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "write": (("keys", "values"), ()),
    "decode": (("queries",), ("partials", "measures")),
    "merge": (("partials", "measures", "sinks", "params"), ("output",)),
    "prefill": (("queries", "tail_keys", "tail_values", "sinks"), ("output",)),
    "copy": ((), ()),
    "gather": (("tail_keys", "tail_values"), ("keys", "values")),
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
DONE = Output((8,), mx.int32)


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

    def run(
        self,
        operation: str,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        groups: Size,
        threads: int,
        outputs: Sequence[Output],
    ) -> list[mx.array]:
        """Outputs of an operation on `groups` threadgroups of `threads` threads. Lazy."""
        if operation not in self._made:
            self._made[operation] = self._make(operation)
        result: list[mx.array] = self._made[operation](
            inputs=list(inputs),
            template=list(template),
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[output.shape for output in outputs],
            output_dtypes=[output.dtype for output in outputs],
        )
        return result

    def _make(self, operation: str) -> Any:
        inputs, outputs = ARGUMENTS[operation]
        if operation not in WITHOUT_PAGES:
            inputs, outputs = (*inputs, *OF_PAGES), (*outputs, "done")
        return self._maker(
            name=f"paged_kv_{operation}",
            input_names=inputs,
            output_names=outputs,
            source=body(self.dialect, operation),
            header=header(self.dialect, operation),
            # Or a slab might be copied, and the copy be written.
            ensure_row_contiguous=False,
        )
