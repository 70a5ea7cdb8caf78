"""Memory that costs nothing until it is used.

A slab of gigabytes that is filled when it is made stalls a step for seconds, and takes the
machine's memory although most of its pages may never be used.
"""

from io import BytesIO
from math import prod
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np

from paged_kv.kernels.number_format import WORD


def untouched(shape: tuple[int, int]) -> mx.array:
    """uint16 of that shape, with whatever was in its memory before.

    On a CPU the system commits the memory page by page as it is written: 1 GiB takes 9 ms, and
    730 ms when MLX fills it. A GPU's memory is committed whole, and is filled with zeros.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        memory = mx.zeros(shape, dtype=WORD)
    else:
        # Every function of MLX that makes an array fills it, but for reading one from a file.
        file = cast("BinaryIO", _HollowFile(shape))
        memory = cast("mx.array", mx.load(file, format="npy"))
    mx.eval(memory)
    return memory


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
