"""Allocates slabs whose memory the system commits only when it is used.

Filling a slab of gigabytes would stall a step for seconds, and would commit memory for pages that
may never be used.

On a CPU the memory comes from an array that MLX loads from a Python file object. MLX does that in
a thread of its own, which needs the interpreter's lock. `mx.clear_cache` holds that lock while it
waits for the streams of all threads. So a process would hang if one thread calls it while another
allocates a slab. A lock of this module keeps the two apart.
"""

import ctypes
import mmap
import sys
from functools import cache, wraps
from io import BytesIO
from threading import Lock
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.number_format import WORD


def untouched(shape: tuple[int, int]) -> mx.array:
    """A uint16 array of zeros of that shape.

    On a CPU Linux commits the memory page by page as it is written: 1 GiB takes 9 ms, against
    730 ms when MLX fills it. Elsewhere, and on a GPU, the whole memory is committed.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        memory = mx.zeros(shape, dtype=WORD)
        mx.eval(memory)
        return memory
    with _reading:
        # Every other MLX function that makes an array fills it.
        memory = cast("mx.array", mx.load(_HeaderOnly(shape), format="npy"))
        mx.eval(memory)
        return memory


_reading = Lock()
_clear_cache = mx.clear_cache


@wraps(_clear_cache)
def _clear_cache_between_reads() -> None:
    with _reading:
        _clear_cache()


mx.clear_cache = _clear_cache_between_reads


class _HeaderOnly(BytesIO):
    """A .npy file that ends behind its header, and says of every read that it gave all bytes.

    MLX allocates an array of the size that the header gives, and lets `readinto` fill it. This one
    only asks for zeros. Memory may have been used before, and a page may be recoded while some of
    its slots were never written: the centre of its keys is that of all slots.
    """

    name = "untouched memory"

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        fields: dict[str, Any] = {"descr": "<u2", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self, fields)
        self.seek(0)

    def readinto(self, buffer: Any) -> int:
        if not super().readinto(buffer):
            _clear(np.frombuffer(buffer, np.uint8))
        return len(buffer)


def _clear(memory: npt.NDArray[np.uint8]) -> None:
    """Let memory be zeros. Linux gives back whole pages of it, and zeros when they are used again:
    man 2 madvise."""
    first = -memory.ctypes.data % mmap.PAGESIZE
    end = max(first, first + (len(memory) - first) // mmap.PAGESIZE * mmap.PAGESIZE)
    whole = memory[first:end]
    if sys.platform == "linux" and whole.size and not _madvise(whole):
        memory[:first] = 0
        memory[end:] = 0
    else:
        memory[:] = 0


def _madvise(memory: npt.NDArray[np.uint8]) -> int:
    """Anything but 0 if the system refuses."""
    return int(_system_madvise()(memory.ctypes.data, memory.size, mmap.MADV_DONTNEED))


@cache
def _system_madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
