"""Replaces `mx.fast.metal_kernel` and `cuda_kernel`: the same calls run on this CPU.

Every launch is noted with what it read and wrote of the slabs, which are the inputs of that name:
tests/support/gpu_on_cpu/launch_order.py looks for launches that nothing orders.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from paged_kv.kernels.gpu import arrays
from tests.support.gpu_on_cpu.cuda_unit import cuda_unit
from tests.support.gpu_on_cpu.cuda_unit import generated_text as cuda_text
from tests.support.gpu_on_cpu.launch import Buffer, Bytes, Mode, launch
from tests.support.gpu_on_cpu.metal_unit import generated_text as metal_text
from tests.support.gpu_on_cpu.metal_unit import metal_unit
from tests.support.gpu_on_cpu.toolchain import KernelError, Unit

_metal_kernel = mx.fast.metal_kernel
MOST_DIMENSIONS = 10  # CUDA kernels get strides for these.

_handle = arrays.handle
_slab_bytes: dict[int, int] = {}


def _noted_handle(slab: mx.array) -> mx.array:
    """A handle, whose slab's size is noted by its address: accesses to the slab are checked."""
    handle = _handle(slab)
    _slab_bytes[np.asarray(handle).ctypes.data] = slab.nbytes
    return handle


arrays.handle = _noted_handle


@dataclass
class Launch:
    """The inputs and outputs of one launch. It holds its arrays, so that no address is used
    twice."""

    name: str
    inputs: list[mx.array]
    outputs: list[mx.array]
    slabs: list[Buffer]


@dataclass
class Device:
    """Runs kernels, and notes each launch.

    Attributes:
        modes: every kernel runs in each of them, and must give the same in all.
    """

    modes: Sequence[Mode] = (Mode(),)
    launches: list[Launch] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def metal_kernel(self, **arguments: Any) -> "EmulatedKernel":
        """Like `mx.fast.metal_kernel`."""
        return EmulatedKernel(self, "metal", **arguments)

    def cuda_kernel(self, **arguments: Any) -> "EmulatedKernel":
        """Like `mx.fast.cuda_kernel`."""
        return EmulatedKernel(self, "cuda", **arguments)


class EmulatedKernel:
    """Like the objects that `mx.fast.metal_kernel` and `mx.fast.cuda_kernel` return."""

    def __init__(
        self,
        device: Device,
        dialect: str,
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
    ) -> None:
        self.device, self.dialect, self.name = device, dialect, name
        self.source, self.header = source, header
        self.input_names, self.output_names = list(input_names), list(output_names)
        self.ensure_row_contiguous = ensure_row_contiguous

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
        unit = self._unit(inputs, template, output_dtypes)
        shapes = list(zip(output_shapes, output_dtypes, strict=True))
        arguments = self._argument_memory(inputs) | self._output_memory(shapes)
        groups = tuple(-(-whole // part) for whole, part in zip(grid, threadgroup, strict=True))
        assert len(groups) == 3
        buffers = [arguments[name] for name in unit.buffers]
        self._run(unit, buffers, groups, threadgroup)
        outputs = [
            _array(arguments[name].contents, shape, dtype)
            for name, (shape, dtype) in zip(self.output_names, shapes, strict=True)
        ]
        slabs = list({id(buffer): buffer for buffer in buffers if buffer.is_slab}.values())
        self.device.launches.append(Launch(self.name, list(inputs), outputs, slabs))
        return outputs

    def _unit(
        self,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        dtypes: Sequence[mx.Dtype],
    ) -> Unit:
        if self.dialect == "metal":
            arguments = (self._real_metal_kernel, self.name, inputs, template, dtypes)
            called, text = metal_text(*arguments)
            unit = metal_unit(text)
        else:
            named = list(zip(self.input_names, inputs, strict=True))
            outputs = list(zip(self.output_names, dtypes, strict=True))
            called, text = cuda_text(self.name, self.header, self.source, named, outputs, template)
            unit = cuda_unit(text)
        if self.device.texts.setdefault(called, text) != text:
            raise KernelError(f"MLX would compile {called} again, from another text")
        return unit

    @cached_property
    def _real_metal_kernel(self) -> Any:
        return _metal_kernel(
            name=self.name,
            input_names=self.input_names,
            output_names=self.output_names,
            source=self.source,
            header=self.header,
            ensure_row_contiguous=self.ensure_row_contiguous,
        )

    def _run(
        self,
        unit: Unit,
        buffers: list[Buffer],
        groups: tuple[int, int, int],
        group_size: tuple[int, int, int],
    ) -> None:
        """Run in each of the device's modes, from the same slabs."""
        before = [buffer.contents.copy() if buffer.is_slab else None for buffer in buffers]
        results: list[list[Bytes]] = []
        for mode in self.device.modes:
            for buffer, contents in zip(buffers, before, strict=True):
                if contents is not None and results:
                    buffer.contents[:] = contents
            launch(unit.library(checked=mode.checked), buffers, groups, group_size, mode)
            written = [each for each in buffers if each.is_slab or each.is_output]
            if len(self.device.modes) > 1:
                results.append([buffer.contents.copy() for buffer in written])
                if any((a != b).any() for a, b in zip(results[0], results[-1], strict=True)):
                    raise KernelError(f"{self.name}: results depend on the order of threads")

    def _output_memory(self, shapes: Sequence[tuple[Sequence[int], mx.Dtype]]) -> dict[str, Buffer]:
        return {
            name: Buffer(name, np.zeros(math.prod(shape) * dtype.size, np.uint8), is_output=True)
            for name, (shape, dtype) in zip(self.output_names, shapes, strict=True)
        }

    def _argument_memory(self, inputs: Sequence[mx.array]) -> dict[str, Buffer]:
        """The buffers of all inputs, and of the shapes and strides that the kernel asks for. A slab
        given twice has one buffer."""
        memory: dict[str, Buffer] = {}
        slabs: dict[int, Buffer] = {}
        for name, array in zip(self.input_names, inputs, strict=True):
            if self.ensure_row_contiguous:
                array = mx.contiguous(array)
                mx.eval(array)
            contents, strides = _storage(array)
            buffer = Buffer(name, contents)
            if name.startswith("slab"):
                buffer = slabs.setdefault(contents.ctypes.data, _slab(name, contents))
            memory[name] = buffer
            strides += [0] * (MOST_DIMENSIONS - len(strides))
            memory[f"{name}_strides"] = Buffer(name, np.array(strides, np.int64).view(np.uint8))
        return memory


def _storage(array: mx.array) -> tuple[Bytes, list[int]]:
    """An array's memory in place, and its strides in elements."""
    words = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(words)
    view = np.asarray(words)
    strides = [stride // view.itemsize for stride in view.strides]
    extent = 1 + sum((n - 1) * s for n, s in zip(view.shape, strides, strict=True))
    if not view.size:
        extent = 0
    flat = np.lib.stride_tricks.as_strided(view, (extent,), (view.itemsize,))
    return flat.view(np.uint8), strides


def _slab(name: str, handle: Bytes) -> Buffer:
    """The whole slab that a handle stands for; or an array that a test gives as one."""
    size = _slab_bytes.get(handle.ctypes.data, handle.size)
    whole = np.lib.stride_tricks.as_strided(handle, (size,), (1,))
    return Buffer(name, whole, is_slab=True)


def _array(contents: Bytes, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    return mx.array(contents).view(dtype).reshape(shape)
