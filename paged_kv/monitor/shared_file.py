"""A file that one process overwrites repeatedly while others read it.

    length and CRC-32 of the content, 8 hexadecimal digits each, a line feed, the content

It is written in place, in one call: renaming another one over it would make some file systems write
to the disk each time. Who reads sees by the checksum that a write came in between, and reads again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from zlib import crc32

_HEAD = 17
_ATTEMPTS = 50


class SharedFile:
    """The writer's side.

    Raises:
        OSError: the file cannot be made, or is a link.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._path = path
        self._file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)

    def is_there(self) -> bool:
        """Whether the file still exists."""
        return os.fstat(self._file.fileno()).st_nlink > 0

    def write(self, content: bytes) -> None:
        """Replace the content."""
        head = f"{len(content):08x}{crc32(content):08x}\n".encode()
        os.pwrite(self._file.fileno(), head + content, 0)

    def remove(self) -> None:
        """Delete it."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def read_shared(path: Path) -> bytes:
    """The latest content.

    Raises:
        FileNotFoundError: there is no such file, or nothing in it yet.
        OSError: it is broken, or cannot be read.
    """
    for _ in range(_ATTEMPTS):
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            text = file.read()
        if not text:
            raise FileNotFoundError(f"{path} is empty")
        length, checksum = _numbers(text[:_HEAD])
        content = text[_HEAD : _HEAD + length]
        if len(content) == length and crc32(content) == checksum:
            return content
        time.sleep(0.001)
    raise OSError(f"{path} is broken: delete it")


def _numbers(head: bytes) -> tuple[int, int]:
    try:
        return int(head[:8], 16), int(head[8:16], 16)
    except ValueError:
        return -1, 0
