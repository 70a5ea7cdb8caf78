"""Asks the processes of this user what their pools hold.

Each process listens on a Unix socket, PID.sock, in a folder that only its owner can enter, and
sends the JSON of `process_view` to whoever connects. The system refuses connections to a socket
that a dead process left.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path

from paged_kv.monitor.process_view import ProcessView

logger = logging.getLogger("paged_kv")

# A process answers once its pools are unlocked, for each of which it waits a second.
PATIENCE_S = 5.0

# Of a folder that backups leave out: https://bford.info/cachedir/
CACHE_SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55"


def running_processes() -> list[ProcessView]:
    """Views of all processes that answer, in the order of their numbers. Processes with another
    version of this package are left out.

    Raises:
        TimeoutError: there are some, and none answers.
        OSError: the folder cannot be read, or is not the user's alone.
    """
    views: list[ProcessView] = []
    silent: list[TimeoutError] = []
    for path in _sockets():
        try:
            views.append(_view(path))
        except TimeoutError as error:
            silent.append(error)
        except (ProcessLookupError, ValueError):
            continue
    if silent and not views:
        raise silent[0]
    for each in silent:
        logger.warning("%s", each)
    return views


def running_process(pid: int) -> ProcessView:
    """A view of one process.

    Raises:
        ProcessLookupError: there is no such process, or it has no socket.
        PermissionError: it is another user's.
        TimeoutError: it does not answer.
        ValueError: it has another version of this package.
        OSError: the folder cannot be read, or is not the user's alone.
    """
    folder = runtime_folder()
    if folder.exists():
        require_private(folder)
        with suppress(ProcessLookupError):
            return _view(folder / f"{pid}.sock")
    _require_own(pid)
    raise ProcessLookupError(
        f"process {pid} runs, and has no socket in {folder}: it has no pool of pages yet, was "
        "started with PAGED_KV_PUBLISH=0 or another XDG_RUNTIME_DIR, or cannot make one there, as "
        "where the path has more than 103 bytes"
    )


def remove_stale() -> None:
    """Remove the sockets of dead processes.

    Raises:
        OSError: the folder cannot be read, or is not the user's alone.
    """
    for path in _sockets():
        with suppress(OSError):
            _connected(path).close()


def _view(path: Path) -> ProcessView:
    try:
        with _connected(path) as connection, connection.makefile("rb") as answer:
            content = json.load(answer)
    except TimeoutError:
        raise TimeoutError(
            f"process {path.stem} has not answered within {PATIENCE_S:g} s: it is stopped, or "
            "hangs in code that lets no other thread run"
        ) from None
    except (ConnectionError, json.JSONDecodeError):
        raise ProcessLookupError(f"process {path.stem} has ended") from None
    return ProcessView.from_dict(content)


def _connected(path: Path) -> socket.socket:
    """A connection to a process. Removes the socket of a dead one."""
    if not path.is_socket():
        raise ProcessLookupError(f"process {path.stem} has no socket")
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_S)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        if not isinstance(error, ConnectionRefusedError | FileNotFoundError):
            raise
        path.unlink(missing_ok=True)
        raise ProcessLookupError(f"process {path.stem} has ended") from None
    return connection


def _sockets() -> list[Path]:
    """The sockets of all processes, dead ones included."""
    folder = runtime_folder()
    if not folder.exists():
        return []
    require_private(folder)
    paths = [each for each in folder.iterdir() if re.fullmatch(r"[1-9][0-9]*\.sock", each.name)]
    return sorted(paths, key=lambda path: int(path.stem))


def _require_own(pid: int) -> None:
    try:
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


def runtime_folder() -> Path:
    """$XDG_RUNTIME_DIR/paged-kv, or the folder "run" of the cache folder where there is none.

    Raises:
        FileNotFoundError: there is neither, as nobody knows the user's home.
    """
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "paged-kv"
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise FileNotFoundError("there is no home folder: set XDG_RUNTIME_DIR") from None
    return Path(cache) / "paged-kv" / "run"


def make_runtime_folder(folder: Path) -> None:
    """Create the folder if it is missing.

    Raises:
        OSError: it cannot be made, or others than its owner, or another owner, could write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_private(folder)
    if folder.name == "run":
        tag = folder.parent / "CACHEDIR.TAG"
        if not tag.exists():
            tag.write_text(f"{CACHE_SIGNATURE}\n# A cache of paged_kv.\n")


def require_private(folder: Path) -> None:
    """Raise a PermissionError unless this is a folder of the user that nobody else can enter."""
    status = os.lstat(folder)
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not is_private or status.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} must be a folder of yours that nobody else can enter: chmod 700 it, or "
            "delete it"
        )
