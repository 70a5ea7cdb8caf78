"""The compiler that runs GPU kernels on a CPU: clang of the ziglang wheel, which needs no root.

What was compiled is kept in the user's cache folder, by a hash of all that determines it.
"""

import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
# Read before tests give the package another folder: all processes and runs share what was compiled.
CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
TARGET = "--target=x86_64-linux-gnu"
RUNTIME = ("fibers.cpp", "checker.cpp", "conversions.cpp")
# Not the fastest flags: these keep the order of every sum.
COMMON = ["-mavx2", "-mfma", "-mf16c", "-ffp-contract=off", "-fno-math-errno", "-w"]
COMMON += ["-ftrivial-auto-var-init=pattern"]
CHECKED = ["-O1", "-fsanitize=thread"]
CHECKED += ["-fsanitize=bounds,shift,integer-divide-by-zero,signed-integer-overflow"]
CHECKED += ["-fsanitize=float-cast-overflow", "-fsanitize-recover=all"]
for _option in ("func-entry-exit=0", "atomics=0", "read-before-write=1"):
    CHECKED += ["-mllvm", f"-tsan-instrument-{_option}"]
FAST = ["-O2"]
RUNTIME_FLAGS = ["-std=c++20", "-O2", "-fno-exceptions", "-fno-rtti", "-ffreestanding"]


class KernelError(Exception):
    """A kernel does not compile, or did something forbidden."""


def why_not() -> str:
    """Why kernels cannot run here; empty if they can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "GPU kernels run on a CPU only where that is an x86-64 under Linux"
    return "" if find_spec("ziglang") else "no ziglang: pip install 'paged-kv[ci]'"


@cache
def _zig_folder() -> Path:
    spec = find_spec("ziglang")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def cache_folder() -> Path:
    folder = CACHES / "paged_kv_gpu_on_cpu"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(*arguments: str | Path) -> str:
    """Run a tool of zig; returns its output.

    Raises:
        KernelError: it failed; with what it wrote.
    """
    command = [str(_zig_folder() / "zig"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(done.stderr)
    return done.stdout


def compiler_arguments(flags: list[str], source: Path) -> list[str | Path]:
    """Arguments that do not name the source's folder, so that its path does not matter."""
    headers = ["-nostdinc", "-isystem", str(_zig_folder() / "lib" / "include")]
    return ["clang", TARGET, *headers, "-I", HERE, "-fPIC", *flags, source]


def build(text: str, suffix: str, flags: list[str], libraries: list[Path]) -> Path:
    """A shared library of one source text.

    Raises:
        KernelError: it does not compile.
    """
    parts = [version("ziglang"), text, suffix, *flags, *(each.name for each in libraries)]
    name = hashlib.sha256("\0".join([*parts, _headers()]).encode()).hexdigest()[:24]
    library = cache_folder() / f"{name}.so"
    if library.exists():
        return library
    # Several processes may build the same kernel: each uses its own names, and the last one stays.
    source = cache_folder() / f"{name}-{os.getpid()}.{suffix}"
    built, linked = source.with_suffix(".o"), source.with_suffix(".so")
    try:
        source.write_text(text)
        run(*compiler_arguments([*flags, "-c", "-o", str(built)], source))
        run("ld.lld", "-shared", "-o", linked, built, *libraries)
        linked.rename(library)
    finally:
        for leftover in (source, built):
            leftover.unlink(missing_ok=True)
    return library


@dataclass(frozen=True)
class Unit:
    """A kernel that can be built.

    Attributes:
        buffers: names of the arguments that are memory, in their order.
    """

    text: str
    suffix: str
    flags: tuple[str, ...]
    buffers: tuple[str, ...]

    def library(self, *, checked: bool) -> Path:
        """The built library, with or without reports of every access to memory.

        Raises:
            KernelError: it does not compile.
        """
        flags = [*self.flags, *COMMON, *(CHECKED if checked else FAST)]
        # A CPU gains nothing from unrolled loops, and they take a third of the compiler's time.
        text = re.sub(r'_Pragma\("[^"]*unroll[^"]*"\)', "", self.text)
        return build(text, self.suffix, flags, [runtime_library()])

    def require(self, faults_of: Callable[[str], Collection[str]]) -> None:
        """Check clang's syntax tree, unless this text was checked before.

        Raises:
            KernelError: there are faults.
        """
        name = hashlib.sha256("\0".join([self.text, _headers()]).encode()).hexdigest()[:24]
        stamp = cache_folder() / f"{name}.checked"
        if stamp.exists():
            return
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel"
            source.write_text(self.text)
            dump = ["-fsyntax-only", "-Xclang", "-ast-dump", "-fno-color-diagnostics"]
            tree = run(*compiler_arguments([*self.flags, *COMMON, *dump], source))
        if faults := faults_of(tree):
            raise KernelError("\n".join(sorted(faults)))
        stamp.touch()


@cache
def _headers() -> str:
    return "".join(path.read_text() for path in sorted(HERE.rglob("*.h")))


@cache
def runtime_library() -> Path:
    text = "\n".join((HERE / name).read_text() for name in RUNTIME)
    return build(text, "cpp", RUNTIME_FLAGS, [])
