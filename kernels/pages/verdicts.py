"""Remembers which kernels are right on this device: each is checked before it is used.

A file in the cache folder holds what was found, for the device, the kernels and the versions it was
found with: later ones may be right. A kernel that hangs the device or ends the process is not tried
again: before a check its kernels are marked. Who checks holds a lock, so a mark without a holder is
of a process that ended within.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from threading import RLock

import mlx.core as mx
from filelock import FileLock, Timeout

from paged_kv.kernels.pages.errors import warn_once

RIGHT, TRYING = "right", "being tried"
NEVER_ENDED = "its check hung or ended the process"
# Seconds to wait for another process's checks. On a GPU compiling a kernel takes up to five.
PATIENCE = 120.0


class WrongKernel(Exception):
    """A kernel is not to be used; the message says why."""


class Verdicts:
    """The verdicts on the kernels of one backend on this device.

    Attributes:
        backend: with its device and the versions.
        found: by the name of a kernel, `RIGHT` or what is wrong with it.
        failure: why no kernel of the backend is to be used; None if all are right so far.
    """

    def __init__(self, file: Path, backend: str) -> None:
        self.backend = backend
        self.found: dict[str, str] = {}
        self.failure: str | None = None
        self._file = file
        self._is_writable = True
        self._lock = RLock()
        self._file_lock = FileLock(file.with_suffix(".lock"), thread_local=False)
        if TRYING in self._add(read_found(self._file, self.backend)).values():
            with suppress(Timeout), self._locked(timeout=0):
                self._resolve_marks()

    def require(self, kernels: Collection[str], check: Callable[[], str | None]) -> None:
        """Check kernels that have no verdict, and wait for another process that does. `check` runs
        them, and returns what is wrong.

        Raises:
            WrongKernel: some kernel of the backend is wrong, not necessarily one of these.
        """
        with self._lock:
            if self._is_open(kernels):
                try:
                    with self._locked(PATIENCE):
                        self._resolve_marks()
                        if self._is_open(kernels):
                            self._try(kernels, check)
                except Timeout:
                    self._fail("another process has been checking kernels for minutes")
            if self.failure is not None:
                raise WrongKernel(self.failure)

    def check_again(self, name: str, check: Callable[[], str | None]) -> None:
        """Check something whatever is known.

        Raises:
            Timeout: another process has been checking kernels for minutes.
        """
        with self._lock, self._locked(PATIENCE):
            self._try([name], check)

    def _is_open(self, kernels: Collection[str]) -> bool:
        return self.failure is None and any(self.found.get(each) != RIGHT for each in kernels)

    def _try(self, kernels: Collection[str], check: Callable[[], str | None]) -> None:
        self._write(dict.fromkeys(kernels, TRYING))
        try:
            verdict = check() or RIGHT
        except BaseException:  # interrupted: nothing is known
            self._write(dict.fromkeys(kernels))
            raise
        self._write(dict.fromkeys(kernels, verdict))

    def _resolve_marks(self) -> None:
        """Take what other processes have found, and count as wrong what they did not live to find.
        Nobody checks meanwhile."""
        found = self._add(read_found(self._file, self.backend))
        dead = [kernel for kernel, verdict in found.items() if verdict == TRYING]
        if dead:
            self._write(dict.fromkeys(dead, NEVER_ENDED))

    def _add(self, found: Mapping[str, str]) -> Mapping[str, str]:
        self.found.update(found)
        wrong = {kernel: each for kernel, each in found.items() if each not in (RIGHT, TRYING)}
        for kernel, verdict in wrong.items():
            first, *_ = verdict.split("\n")  # compilers say more
            self._fail(f"{kernel}: {first}")
        return found

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            warn_once(
                f"kernels are disabled, and plain MLX operations serve everything: {reason} "
                f"({self.backend}). Please report it: paged-kv doctor --report report.md"
            )

    @contextmanager
    def _locked(self, timeout: float) -> Iterator[None]:
        """Hold the lock of all processes, if there can be one.

        Raises:
            Timeout: another process holds it for so many seconds.
        """
        if self._is_writable:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file_lock.acquire(timeout)
            except Timeout:
                raise
            except (OSError, NotImplementedError) as error:
                self._stop_writing(error)
        try:
            yield
        finally:
            self._file_lock.release()

    def _write(self, verdicts: Mapping[str, str | None]) -> None:
        """Let verdicts hold from now on; None for no verdict."""
        for kernel in verdicts:
            self.found.pop(kernel, None)
        self._add({kernel: each for kernel, each in verdicts.items() if each is not None})
        if not self._is_writable:
            return
        try:
            write_found(self._file, self.backend, self.found)
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: Exception) -> None:
        self._is_writable = False
        warn_once(f"{self._file} cannot be written, so each process checks kernels anew: {error}")


def verdicts_on(variant: str, build: str) -> Verdicts:
    """Those on the kernels of a backend here, see `Backend.variant` and `Backend.build`; the same
    for all of a process."""
    versions = f"mlx {version('mlx')}, paged_kv {version('paged-kv')}"
    return _verdicts(verdict_file(), f"{variant} {build} on {device_name()}, {versions}")


_verdicts = cache(Verdicts)


@cache
def digest_of(*paths: Path) -> str:
    """A digest of the content of files, and of the files in folders."""
    content = sha256()
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file():
                content.update(file.read_bytes())
    return content.hexdigest()[:16]


def forget_verdicts() -> None:
    """Check all kernels again.

    Raises:
        OSError: the file cannot be deleted.
    """
    verdict_file().unlink(missing_ok=True)
    _verdicts.cache_clear()


def verdict_file() -> Path:
    """kernels.json in the folder paged-kv of $XDG_CACHE_HOME, or of ~/.cache."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "paged-kv" / "kernels.json"


def device_name() -> str:
    """What MLX calls the device that it computes on."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device())


def read_found(file: Path, of: str) -> dict[str, str]:
    """What a file says that was found of something; nothing where it cannot be read."""
    return _read(file).get(of, {})


def write_found(file: Path, of: str, found: Mapping[str, str]) -> None:
    """Let a file say this of something, and the same as before of all else. Other processes read
    all of the file or nothing.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(_read(file) | {of: dict(found)}))
    temporary.replace(file)


def _read(file: Path) -> dict[str, dict[str, str]]:
    try:
        return {key: dict(each) for key, each in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warn_once(f"{file} cannot be read, so what it says is checked anew: {error}")
        return {}
