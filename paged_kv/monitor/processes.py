"""Asks the processes of this user what their pools hold.

In a folder that only its owner can enter, each process keeps a file PID.json. Whoever asks touches
the file "question"; each process then writes a `ProcessView` to its own: see `publisher`. A file
that is older than the question is no answer, and that of a process that has ended is removed. The
view as JSON:

    {"paged_kv": 1, "pid": 71, "command": "...", "time": 1760000000.0, "pools": [
      {"name": "llama", "number": 0, "stats": {...},
       "slabs": [[group, slab, "fp16", "u3.c12"], ...],
       "sequences": [["3f2a9c01", tokens, blocks, shared, bytes], ...]}],
      "ranks": [[0, budget, mapped, active], ...]}

"stats" is what `PoolStats.as_dict` gives; the states of blocks are written as `packed` says.
Sequences are the largest ones. "ranks", in bytes, is there where several processes share the model.
There is nothing of what tokens say, and nothing made of it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paged_kv.allocator.block_allocator import SlabMap, packed, unpacked
from paged_kv.checks import cache_folder
from paged_kv.pool.stats import PoolStats
from paged_kv.ranks import RankMemory

logger = logging.getLogger("paged_kv")

# A process answers once its pools are unlocked, for each of which it waits a second.
PATIENCE_S = 5.0
_LOOK_S = 0.02

# Of a folder that backups leave out: https://bford.info/cachedir/
_CACHE_SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55"


def running_processes() -> list[ProcessView]:
    """Views of all processes that answer, in the order of their numbers. Processes with another
    version of this package are left out.

    Raises:
        TimeoutError: there are some, and none answers.
        OSError: the folder cannot be read, or is not the user's alone.
    """
    folder = runtime_folder()
    if not folder.exists():
        return []
    views: list[ProcessView] = []
    silent: list[TimeoutError] = []
    question, until = _ask(folder), time.monotonic() + PATIENCE_S
    for pid in sorted({pid for _, pid in _files(folder)}):
        try:
            views.append(_answer(folder, pid, question, until))
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
        ProcessLookupError: there is no such process, or it shows nothing.
        PermissionError: it is another user's.
        TimeoutError: it does not answer.
        ValueError: it has another version of this package.
        OSError: the folder cannot be read, or is not the user's alone.
    """
    folder = runtime_folder()
    if folder.exists():
        question = _ask(folder)
        with suppress(ProcessLookupError):
            return _answer(folder, pid, question, time.monotonic() + PATIENCE_S)
    _require_own(pid)
    raise ProcessLookupError(
        f"process {pid} runs, and has no file in {folder}: it has no pool of pages yet, was "
        "started with PAGED_KV_PUBLISH=0 or another XDG_RUNTIME_DIR, or cannot write there"
    )


def last_question(folder: Path) -> int:
    """When somebody last asked, in nanoseconds of the folder's file system; 0 if nobody has."""
    try:
        return (folder / "question").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def is_later(status: os.stat_result, question: int) -> bool:
    """Whether a file was written after a question. Clocks of file systems have ticks of some
    milliseconds: in one tick an empty file comes before a question, and an answer after it."""
    written = status.st_mtime_ns
    return written > question or (written == question and status.st_size > 0)


def remove_ended(folder: Path) -> None:
    """Remove the files of processes that have ended."""
    for path, pid in _files(folder):
        if not _is_running(pid):
            path.unlink(missing_ok=True)


def _ask(folder: Path) -> int:
    """Ask all processes; returns the `last_question`."""
    require_private(folder)
    (folder / "question").touch()
    return last_question(folder)


def _answer(folder: Path, pid: int, question: int, until: float) -> ProcessView:
    """What a process has written since the question. Removes the file of one that has ended."""
    path = folder / f"{pid}.json"
    while True:
        if not _is_running(pid):
            path.unlink(missing_ok=True)
        try:
            is_answer = is_later(path.stat(), question)
            content = path.read_bytes()
        except FileNotFoundError:
            raise ProcessLookupError(f"process {pid} has ended, or shows nothing") from None
        if is_answer and not content:
            raise ProcessLookupError(f"process {pid} has begun after it was asked")
        if is_answer:
            return ProcessView.from_dict(json.loads(content))
        if time.monotonic() > until:
            raise TimeoutError(
                f"process {pid} has not answered within {PATIENCE_S:g} s: it is stopped, hangs in "
                "code that lets no other thread run, or is another program with the number of one "
                f"that was killed; then delete {path}"
            )
        time.sleep(_LOOK_S)


def _files(folder: Path) -> list[tuple[Path, int]]:
    """The files of processes, and the numbers of these."""
    names = re.compile(r"([1-9][0-9]*)\.(json|part)")
    found = [(path, names.fullmatch(path.name)) for path in folder.iterdir()]
    return [(path, int(match[1])) for path, match in found if match]


def _is_running(pid: int) -> bool:
    try:
        _require_own(pid)
    except OSError:
        return False
    return True


def _require_own(pid: int) -> None:
    """Raise an OSError unless this user has a process with this number."""
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
    cache = cache_folder()
    if cache.parts[0] == "~" and not os.environ.get("XDG_CACHE_HOME"):
        raise FileNotFoundError("there is no home folder: set XDG_RUNTIME_DIR")
    return cache / "run"


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
            tag.write_text(f"{_CACHE_SIGNATURE}\n# A cache of paged_kv.\n")


def require_private(folder: Path) -> None:
    """Raise a PermissionError unless this is a folder of the user that nobody else can enter."""
    status = os.lstat(folder)
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not is_private or status.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} must be a folder of yours that nobody else can enter: chmod 700 it, or "
            "delete it"
        )


VERSION = 1  # of the JSON of a view


class SequenceView(NamedTuple):
    """A sequence of a pool: the beginning of its uid, its context length, the entries of its block
    tables in all groups, those of them that other sequences hold too, and the bytes of all."""

    name: str
    tokens: int
    blocks: int
    shared: int
    nbytes: int


@dataclass(frozen=True)
class PoolView:
    """One pool, whose number is unique within the process, with the group and the block map of each
    slab, and the largest sequences, the largest first."""

    name: str
    number: int
    stats: PoolStats
    slabs: tuple[tuple[int, SlabMap], ...] = ()
    sequences: tuple[SequenceView, ...] = ()


@dataclass(frozen=True)
class ProcessView:
    """All pools of one process, in the order of their creation, at a time in seconds since 1970.
    `ranks` is the memory of each process that computes the model with this one, if any does."""

    pid: int
    command: str
    time: float
    pools: tuple[PoolView, ...]
    ranks: tuple[tuple[int, RankMemory], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The JSON form that the module describes."""
        shared = {"ranks": [[rank, *memory] for rank, memory in self.ranks]} if self.ranks else {}
        process = {"pid": self.pid, "command": self.command, "time": self.time}
        pools = [_pool_as_dict(pool) for pool in self.pools]
        return {"paged_kv": VERSION, **process, "pools": pools, **shared}

    @classmethod
    def from_dict(cls, content: Any) -> ProcessView:
        """The view from its JSON form.

        Raises:
            ValueError: it is none, or of another version.
        """
        version = content.get("paged_kv") if isinstance(content, dict) else None
        if version != VERSION:
            raise ValueError(
                f"this is no snapshot of this paged_kv: it has version {version!r}, and {VERSION} "
                "is read. `paged-kv stats --json` of the version that is installed makes one"
            )
        try:
            pools = tuple([_pool_from_dict(each) for each in content["pools"]])
            ranks = tuple([(rank, RankMemory(*each)) for rank, *each in content.get("ranks", [])])
            return cls(
                int(content["pid"]), content["command"], float(content["time"]), pools, ranks
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this snapshot is broken: {error!r}") from None


def _pool_as_dict(pool: PoolView) -> dict[str, Any]:
    return {
        "name": pool.name,
        "number": pool.number,
        "stats": pool.stats.as_dict(),
        "slabs": [
            [group, each.slab, each.page_format, packed(each.states)] for group, each in pool.slabs
        ],
        "sequences": [list(each) for each in pool.sequences],
    }


def _pool_from_dict(content: Any) -> PoolView:
    return PoolView(
        content["name"],
        content["number"],
        PoolStats.from_dict(content["stats"]),
        tuple([(g, SlabMap(slab, name, unpacked(m))) for g, slab, name, m in content["slabs"]]),
        tuple([SequenceView(*each) for each in content["sequences"]]),
    )
