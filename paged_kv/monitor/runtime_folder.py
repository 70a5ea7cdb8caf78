"""The folder in which processes of one user publish their pools; tells live processes from dead
ones."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

# Of a folder that backups leave out: https://bford.info/cachedir/
CACHE_SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55"


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


def make_runtime_folder() -> Path:
    """The folder; creates it if it is missing.

    Raises:
        OSError: it cannot be made, or others than its owner, or another owner, could write to it.
    """
    folder = runtime_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_private(folder)
    if folder.name == "run":
        tag = folder.parent / "CACHEDIR.TAG"
        if not tag.exists():
            tag.write_text(f"{CACHE_SIGNATURE}\n# A cache of paged_kv.\n")
    return folder


def require_private(folder: Path) -> None:
    """Raise a PermissionError unless this is a folder of the user that nobody else can enter."""
    status = os.lstat(folder)
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not is_private or status.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} must be a folder of yours that nobody else can enter: chmod 700 it, or "
            "delete it"
        )


def process_start(pid: int) -> str | None:
    """The start time of a process, as the system writes it; None if there is no such process. It
    tells a process from an earlier one with the same id."""
    if sys.platform != "linux":
        asked = ["ps", "-o", "lstart=", "-p", str(pid)]
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or None
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program, in brackets, may hold anything.
    fields = text[text.rindex(")") + 1 :].split()
    return None if fields[0] in "ZX" else fields[19]
