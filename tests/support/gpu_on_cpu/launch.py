"""One launch of a built kernel on this CPU."""

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.gpu_on_cpu.toolchain import KernelError, runtime_library

Bytes = npt.NDArray[np.uint8]

ORDERS = {"forward": 0, "reverse": 1, "shuffled": 2}
LINE = 64
RED_ZONE = 1 << 14


@dataclass
class Buffer:
    """Memory of one argument of a kernel.

    Attributes:
        is_output: the kernel must write all of it.
        is_slab: an input that the kernel may write.
        read, written: after a checked launch, which lines of 64 bytes were.
        reader: of each line 1 + the threadgroup that read it last.
        loads: how many lines threadgroups read in it, a line once for each that did.
    """

    name: str
    contents: Bytes
    is_output: bool = False
    is_slab: bool = False
    read: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    written: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    reader: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    loads: int = 0


@dataclass(frozen=True)
class Mode:
    """How to run a kernel.

    Attributes:
        checked: with a look at every access to memory.
        order: of threads and threadgroups: forward, reverse or shuffled.
        shared_limit: the bytes of threadgroup memory that the device has.
    """

    checked: bool = True
    order: str = "forward"
    seed: int = 0
    shared_limit: int = 32 << 10


class _Options(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint32) for name in ("order", "seed", "is_checked", "shared_limit")
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("is_writable", ctypes.c_uint32),
        ("is_written_before", ctypes.c_uint32),
        ("read", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
        ("reader", ctypes.c_void_p),
        ("loads", ctypes.c_uint64),
        ("cells", ctypes.c_void_p),
    )


@cache
def _runtime() -> Any:
    library = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
    library.gpu_faults.restype = ctypes.c_char_p
    return library


@cache
def _loaded(library: Path) -> Any:
    return ctypes.CDLL(str(library)).entry


def launch(
    library: Path,
    buffers: Sequence[Buffer],
    groups: tuple[int, int, int],
    group_size: tuple[int, int, int],
    mode: Mode,
) -> None:
    """Run a kernel. Afterwards the buffers' contents hold what it wrote.

    Raises:
        KernelError: it did what it must not; nothing is written then.
    """
    runtime = _runtime()
    memory = _placed({id(buffer): buffer for buffer in buffers}.values(), mode)
    structs = (_Buffer * len(memory))(*(_struct(buffer, view) for buffer, view in memory.values()))
    at = [memory[id(buffer)][1].ctypes.data for buffer in buffers]
    addresses = (ctypes.c_uint64 * len(buffers))(*at)
    options = _Options(ORDERS[mode.order], mode.seed, mode.checked, mode.shared_limit)
    three = ctypes.c_uint32 * 3
    faults = runtime.gpu_launch(
        _loaded(library),
        addresses,
        three(*groups),
        three(*group_size),
        ctypes.byref(options),
        structs,
        len(structs),
    )
    if faults:
        raise KernelError(_without_addresses(runtime.gpu_faults().decode()))
    for (buffer, view), struct in zip(memory.values(), structs, strict=True):
        buffer.loads = struct.loads
        if (buffer.is_output or buffer.is_slab) and view is not buffer.contents:
            buffer.contents[:] = view


def _placed(buffers: Collection[Buffer], mode: Mode) -> dict[int, tuple[Buffer, Bytes]]:
    """Memory for each buffer, by identity, between red zones. Without checks the contents
    themselves, if the kernel can use them in place."""
    if not mode.checked:
        return {id(buffer): (buffer, _aligned(buffer.contents)) for buffer in buffers}
    sizes = [-(-buffer.contents.nbytes // 256) * 256 + RED_ZONE for buffer in buffers]
    arena = np.full(sum(sizes) + RED_ZONE + 256, 0xFF, np.uint8)
    at = RED_ZONE + -(arena.ctypes.data + RED_ZONE) % 256
    placed = {}
    for buffer, size in zip(buffers, sizes, strict=True):
        view = arena[at : at + buffer.contents.nbytes]
        if not buffer.is_output:
            view[:] = buffer.contents
        placed[id(buffer)] = buffer, view
        at += size
    return placed


def _aligned(contents: Bytes) -> Bytes:
    """The same memory, or a copy if it does not begin at a multiple of 16 bytes as a device's
    would."""
    if contents.ctypes.data % 16 == 0:
        return contents
    memory = np.empty(contents.nbytes + 16, np.uint8)
    first = -memory.ctypes.data % 16
    memory[first : first + contents.nbytes] = contents
    return memory[first : first + contents.nbytes]


def _struct(buffer: Buffer, view: Bytes) -> _Buffer:
    if buffer.is_slab:
        lines = -(-view.nbytes // LINE) + 1
        buffer.read, buffer.written = np.zeros(lines, np.uint8), np.zeros(lines, np.uint8)
        buffer.reader = np.zeros(lines, np.uint32)
    return _Buffer(
        memory=view.ctypes.data,
        bytes=view.nbytes,
        name=buffer.name.encode(),
        is_writable=buffer.is_output or buffer.is_slab,
        is_written_before=not buffer.is_output,
        read=buffer.read.ctypes.data if buffer.is_slab else None,
        written=buffer.written.ctypes.data if buffer.is_slab else None,
        reader=buffer.reader.ctypes.data if buffer.is_slab else None,
    )


def _without_addresses(faults: str) -> str:
    """The runtime puts the instruction before each line."""
    return "\n".join(dict.fromkeys(line[17:] for line in faults.splitlines()))
