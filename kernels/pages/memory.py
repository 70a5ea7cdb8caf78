"""Finds how much memory this machine has for pages, bounds what MLX keeps beside them, and
allocates slabs whose memory the system commits only when it is used.

Filling a slab of gigabytes would stall a step for seconds, and would commit memory for pages that
may never be used. On a CPU the memory comes from an array that MLX loads from a Python file object.
MLX does that in a thread of its own, which needs the interpreter's lock. `mx.clear_cache` holds
that lock while it waits for the streams of all threads. So a process would hang if one thread calls
it while another allocates a slab. A lock of this module keeps the two apart.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.number_format import WORD

# Without a given budget, the rest is left to the system and to a step's activations.
RECOMMENDED_SHARE = 0.8

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def recommended_bytes() -> int:
    """80 % of `device_bytes`, less what MLX holds now; at least 1."""
    usable = int(RECOMMENDED_SHARE * device_bytes()) - mx.get_active_memory()
    return max(usable, 1)


def require_memory(needed: int) -> None:
    """Check that an array of `needed` bytes fits beside what MLX holds now.

    Raises:
        MemoryError: it does not fit.
    """
    total, held = device_bytes(), mx.get_active_memory()
    if needed > total - held:
        raise MemoryError(
            f"a slab of {needed:,} bytes does not fit: this machine has {total:,}, of which MLX "
            f"holds {held:,}. Give the pool a smaller max_bytes"
        )


@contextmanager
def limited_freed_buffers(nbytes: int) -> Iterator[None]:
    """Let MLX keep at most `nbytes` of freed buffers, and no more than its former limit, which it
    gets back at the end. On a CPU, MLX limits itself to 32 MiB."""
    former = mx.set_cache_limit(nbytes)
    mx.set_cache_limit(min(former, nbytes))
    try:
        yield
    finally:
        mx.set_cache_limit(former)


def return_to_system() -> None:
    """Give memory that MLX has freed to the system: MLX keeps freed arrays for later ones, and the
    C library of Linux keeps what MLX frees."""
    mx.clear_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def device_bytes() -> int:
    """Metal's recommended working set, or the CUDA device's memory; on a CPU the smaller of the
    control group's limit and the machine's memory."""
    if mx.default_device().type == mx.gpu:
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if key in info:
                return int(info[key])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for text in map(read_if_there, _CGROUP_LIMITS) if text.isdigit()]
    return min([machine, *limits])


def read_if_there(path: Path) -> str:
    """A file's text; empty if it is missing, as on machines without control groups."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def untouched(shape: tuple[int, int]) -> mx.array:
    """A uint16 array of zeros of that shape.

    On a CPU Linux commits the memory page by page as it is written: 1 GiB takes 9 ms, against
    730 ms when MLX fills it. Elsewhere, and on a GPU, the whole memory is committed; a GPU fills it
    while Python goes on, and MLX raises where it has none.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        memory = mx.zeros(shape, dtype=WORD)
        mx.async_eval(memory)  # type: ignore[no-untyped-call]  # mlx's stubs forget its types
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
    is_clear = False
    if sys.platform == "linux" and whole.size:
        at, size = ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(whole.size)
        is_clear = not ctypes.CDLL(None).madvise(at, size, mmap.MADV_DONTNEED)
    if is_clear:
        memory[:first] = 0
        memory[end:] = 0
    else:
        memory[:] = 0
