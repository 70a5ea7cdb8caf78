"""Memory that costs nothing until it is used.

A slab of gigabytes that is filled when it is made stalls a step for seconds, and takes the
machine's memory although most of its pages may never be used.

On a CPU the memory comes from an array that MLX reads from a Python object, in a thread of its own
that needs the interpreter's lock for it. `mx.clear_cache` waits for the streams of all threads
without giving that lock up, so the two must not meet: a process in which one thread generates and
another makes a slab would hang. They take turns here.
"""

from functools import wraps
from io import BytesIO
from math import prod
from threading import Lock
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np

from paged_kv.kernels.pages.number_format import WORD


def untouched(shape: tuple[int, int]) -> mx.array:
    """uint16 of that shape, with whatever was in its memory before.

    On a CPU the system commits the memory page by page as it is written: 1 GiB takes 9 ms, and
    730 ms when MLX fills it. A GPU's memory is committed whole, and is filled with zeros.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        memory = mx.zeros(shape, dtype=WORD)
        mx.eval(memory)
        return memory
    with _reading:
        # Every function of MLX that makes an array fills it, but for reading one from a file.
        file = cast("BinaryIO", _HollowFile(shape))
        memory = cast("mx.array", mx.load(file, format="npy"))
        mx.eval(memory)
        return memory


_reading = Lock()
_clear_cache = mx.clear_cache


@wraps(_clear_cache)
def _clear_cache_between_reads() -> None:
    with _reading:
        _clear_cache()


mx.clear_cache = _clear_cache_between_reads


class _HollowFile:
    """The header of a .npy file, with nothing behind it: what reads the array gets no bytes."""

    name = "untouched memory"
    closed = False

    def __init__(self, shape: tuple[int, int]) -> None:
        header = BytesIO()
        fields: dict[str, Any] = {"descr": "<u2", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, fields)
        self._header = header.getvalue()
        self._size = len(self._header) + prod(shape) * WORD.size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, count: int) -> bytes:
        content = self._header[self._at : self._at + count]
        self._at += count
        return content

    def readinto(self, buffer: memoryview) -> int:
        content = self._header[self._at : self._at + len(buffer)]
        buffer[: len(content)] = content
        self._at += len(buffer)
        return len(buffer)
