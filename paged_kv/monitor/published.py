"""Reads the views that processes of the same user publish, each in a file that it overwrites.

    length and CRC-32 of the content, 8 hexadecimal digits each, a line feed, the content

A file is written in place, in one call: renaming another one over it would make some file systems
write to the disk each time. Who reads sees by the checksum that a write came in between, and reads
again.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from paged_kv.monitor.process_view import ProcessView
from paged_kv.monitor.runtime_folder import process_start, require_private, runtime_folder

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


def running_processes() -> list[ProcessView]:
    """What each process that runs has published last, in the order of their numbers. Files that
    dead processes left are removed. Processes with another version of this package are left out.

    Raises:
        OSError: the folder cannot be read, or is not the user's alone.
    """
    views = []
    for pid, file in _published():
        with suppress(ValueError):
            views.append(_read(pid, file))
    return [view for view in views if view is not None]


def remove_stale() -> None:
    """Remove the files of dead processes.

    Raises:
        OSError: the folder cannot be read, or is not the user's alone.
    """
    for pid, file in _published():
        if process_start(pid) is None:
            file.unlink(missing_ok=True)


def running_process(pid: int) -> ProcessView:
    """The latest view of one process.

    Raises:
        ProcessLookupError: there is no such process, or it publishes nothing.
        PermissionError: it is another user's.
        OSError: the folder cannot be read, or is not the user's alone.
    """
    folder = runtime_folder()
    if folder.exists():
        require_private(folder)
        view = _read(pid, folder / f"{pid}.json")
        if view is not None:
            return view
    _require_own(pid)
    raise ProcessLookupError(
        f"process {pid} runs, and publishes nothing in {folder}: it has no pool of pages yet, was "
        "started with PAGED_KV_PUBLISH=0 or another XDG_RUNTIME_DIR, or cannot write there"
    )


def _require_own(pid: int) -> None:
    try:
        if process_start(pid) is None:
            raise ProcessLookupError
        os.kill(pid, 0)
    except PermissionError:
        raise PermissionError(
            f"process {pid} is another user's, and shows its pools to that user only: run this "
            "command as that user"
        ) from None
    except (ProcessLookupError, OverflowError):
        raise ProcessLookupError(
            f"there is no process {pid}; `paged-kv stats --list` names those that can be looked at"
        ) from None


def _published() -> list[tuple[int, Path]]:
    """All processes that have published, dead ones included, and their files."""
    folder = runtime_folder()
    if not folder.exists():
        return []
    require_private(folder)
    files = [each for each in folder.iterdir() if re.fullmatch(r"[1-9][0-9]*\.json", each.name)]
    return sorted((int(file.stem), file) for file in files)


def _read(pid: int, file: Path) -> ProcessView | None:
    """The view that a process published; None if it is dead, or does not publish."""
    started = process_start(pid)
    if started is None:
        file.unlink(missing_ok=True)
        return None
    try:
        content = json.loads(read_shared(file))
    except FileNotFoundError:
        return None
    if content.get("started") != started:
        # An earlier process had the same id.
        file.unlink(missing_ok=True)
        return None
    return ProcessView.from_dict(content)
