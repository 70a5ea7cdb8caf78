"""In the place of `mx.fast.metal_kernel`: the same call, run on this CPU.

Every launch is noted with what it read and wrote of the slabs, which are the inputs of that name:
tests/gpu_on_cpu/launch_order.py looks for launches that nothing orders.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from tests.gpu_on_cpu.launch import Buffer, Bytes, Mode, launch
from tests.gpu_on_cpu.metal_unit import generated_text, metal_unit
from tests.gpu_on_cpu.toolchain import KernelError

_real_metal_kernel = mx.fast.metal_kernel


@dataclass
class Launch:
    """What one kernel took and gave; arrays are held, so that none is mistaken for another."""

    name: str
    inputs: list[mx.array]
    outputs: list[mx.array]
    slabs: list[Buffer]


@dataclass
class Device:
    """Where kernels run, and what has run.

    Attributes:
        modes: every kernel runs in each of them, and must give the same in all.
    """

    modes: Sequence[Mode] = (Mode(),)
    launches: list[Launch] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def metal_kernel(self, **arguments: Any) -> "EmulatedKernel":
        """As `mx.fast.metal_kernel`."""
        return EmulatedKernel(self, **arguments)


class EmulatedKernel:
    """As what `mx.fast.metal_kernel` returns."""

    def __init__(
        self,
        device: Device,
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
    ) -> None:
        self.device, self.name, self.source = device, name, source
        self.input_names, self.output_names = list(input_names), list(output_names)
        self.ensure_row_contiguous = ensure_row_contiguous
        self._real = _real_metal_kernel(
            name=name,
            input_names=self.input_names,
            output_names=self.output_names,
            source=source,
            header=header,
            ensure_row_contiguous=ensure_row_contiguous,
        )

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] = (),
    ) -> list[mx.array]:
        mx.eval(list(inputs))
        name, text = generated_text(self._real, self.name, inputs, template, output_dtypes)
        self.device.texts.setdefault(name, text)
        if self.device.texts[name] != text:
            raise KernelError(f"MLX would compile {name} again, from another text")
        unit = metal_unit(text)
        arrays = self._argument_memory(unit.buffers, inputs)
        shapes = list(zip(output_shapes, output_dtypes, strict=True))
        groups = tuple(-(-whole // part) for whole, part in zip(grid, threadgroup, strict=True))
        results: list[list[Bytes]] = []
        before = {key: buffer.contents.copy() for key, buffer in arrays.items() if buffer.is_slab}
        for mode in self.device.modes:
            for key, contents in before.items():
                arrays[key].contents[:] = contents
            for key, (shape, dtype) in zip(self.output_names, shapes, strict=True):
                size = int(np.prod(shape)) * dtype.size
                arrays[key] = Buffer(key, np.zeros(size, np.uint8), is_output=True)
            buffers = [arrays[key] for key in unit.buffers]
            launch(unit.library(checked=mode.checked), buffers, groups, threadgroup, mode)  # type: ignore[arg-type]
            results.append([b.contents.copy() for b in buffers if b.is_slab or b.is_output])
            if any((a != b).any() for a, b in zip(results[0], results[-1], strict=True)):
                raise KernelError(f"{self.name}: results depend on the order of threads")
        outputs = [
            _array(arrays[key].contents, shape, dtype)
            for key, (shape, dtype) in zip(self.output_names, shapes, strict=True)
        ]
        slabs = [buffer for buffer in arrays.values() if buffer.is_slab]
        self.device.launches.append(Launch(self.name, list(inputs), outputs, slabs))
        return outputs

    def _argument_memory(
        self, names: Sequence[str], inputs: Sequence[mx.array]
    ) -> dict[str, Buffer]:
        """The buffers of all inputs, and of the shapes and strides that the kernel asks for. A slab
        given twice is one buffer."""
        memory: dict[str, Buffer] = {}
        slabs: dict[int, Buffer] = {}
        for name, array in zip(self.input_names, inputs, strict=True):
            if self.ensure_row_contiguous:
                array = mx.contiguous(array)
                mx.eval(array)
            contents, strides = _storage(array)
            buffer = Buffer(name, contents, is_slab=name.startswith("slab"))
            if buffer.is_slab:
                buffer = slabs.setdefault(contents.ctypes.data, buffer)
            memory[name] = buffer
            memory[f"{name}_shape"] = Buffer(name, _bytes(np.array(array.shape, np.int32)))
            memory[f"{name}_strides"] = Buffer(name, _bytes(np.array(strides, np.int64)))
        return {name: memory[name] for name in names if name in memory}


def _storage(array: mx.array) -> tuple[Bytes, list[int]]:
    """An array's memory, where it is, and its strides in elements."""
    words = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(words)
    view = np.asarray(words)
    strides = [stride // view.itemsize for stride in view.strides]
    extent = 1 + sum((n - 1) * s for n, s in zip(view.shape, strides, strict=True))
    if not view.size:
        extent = 0
    flat = np.lib.stride_tricks.as_strided(view, (extent,), (view.itemsize,))
    return flat.view(np.uint8), strides


def _bytes(array: Any) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _array(contents: Bytes, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    return mx.array(contents).view(dtype).reshape(shape)
