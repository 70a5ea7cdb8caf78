"""Runs every kernel on this device, disables a backend that is wrong, and says what it found."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from time import perf_counter

import mlx.core as mx

from paged_kv.kernels.backends import (
    Verdict,
    device_backend,
    device_name,
    record_verdict,
    variant,
)
from paged_kv.kernels.cpu.native_library import load_native_library
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.self_test import Check, checks
from paged_kv.openblas import how_to_get_openblas, library_in_use, openblas_version


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes:
        check: the check.
        passed: whether its error is within the tolerance.
        finding: the error, or the exception that it raised.
        seconds: how long it took; this includes compiling the kernel.
    """

    check: Check
    passed: bool
    finding: str
    seconds: float

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        return f"{verdict}  {self.check.name:<32} {1e3 * self.seconds:9.1f} ms  {self.finding}"


@dataclass
class Findings:
    """All that an examination found.

    Attributes:
        system: lines about the backend, the device and the BLAS.
        checks: the results, in the order that the checks ran in.
    """

    system: list[str] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)

    @property
    def wrong(self) -> list[CheckResult]:
        """The checks that failed."""
        return [each for each in self.checks if not each.passed]

    def summary(self) -> str:
        """The verdict, what is wrong, the system, and a line for each operation."""
        parts = self._verdict(), map(str, self.wrong), self.system, self._operations()
        return "\n\n".join(filter(None, map("\n".join, parts)))

    def details(self) -> str:
        """A line for each check."""
        return "\n".join(map(str, self.checks))

    def _operations(self) -> list[str]:
        """How many checks of each operation passed."""
        passed: defaultdict[str, list[bool]] = defaultdict(list)
        for each in self.checks:
            passed[each.check.operation].append(each.passed)
        return [f"{name:<20}  {sum(all_)} of {len(all_)} right" for name, all_ in passed.items()]

    def _verdict(self) -> list[str]:
        """Whether all is right, what is disabled, and what to do."""
        if not self.wrong:
            return ["all checks passed"]
        return [
            f"{len(self.wrong)} of {len(self.checks)} checks failed",
            "the backend is disabled: plain operations serve everything from now on, unless "
            "PAGED_KV_BACKEND names a backend",
            "`paged-kv doctor --reset` undoes this. Please report it: "
            "paged-kv doctor --report report.md",
        ]


_SIZE, _REPETITIONS = 512, 3


def blas_line() -> str | None:
    """A line about the BLAS; None where MLX does not use one that could be replaced: on a GPU, and
    on a Mac."""
    if sys.platform != "linux" or mx.default_device().type != mx.cpu:
        return None
    library = library_in_use()
    speed = f"{_flops() / 1e9:.1f} GFLOP/s in float32"
    if library is None:
        return f"BLAS of MLX: unknown, {speed}"
    if version := openblas_version(library):
        return f"BLAS of MLX: {version}, {library}, {speed}"
    return (
        f"BLAS of MLX: {library.name}, {speed}; OpenBLAS is many times as fast for models in "
        f"float32, and paged_kv uses it where it is installed: {how_to_get_openblas()}"
    )


def _flops() -> float:
    """Floating-point operations a second of a product of float32 matrices, in the best of a few
    tries."""
    one, other = (mx.random.normal((_SIZE, _SIZE)) for _ in range(2))
    mx.eval(one, other)
    return 2 * _SIZE**3 / min(_seconds(one, other) for _ in range(_REPETITIONS))


def _seconds(one: mx.array, other: mx.array) -> float:
    began = perf_counter()
    mx.eval(one @ other)
    return perf_counter() - began


def examine(tell: Callable[[object], None]) -> Findings:
    """Run all checks, and record the verdict in the place of earlier ones.

    Args:
        tell: takes each line as soon as it is found, so that somebody who waits sees where a
            device hangs.

    Raises:
        OSError: the file of verdicts cannot be written.
    """
    backend = device_backend()
    name, found = variant(backend), Findings(_system(backend))
    for line in found.system:
        tell(line)
    for check in checks(backend):
        found.checks.append(_result(check))
        tell(found.checks[-1])
    record_verdict(name, Verdict(disabled=bool(found.wrong)))
    return found


def _system(backend: Backend) -> list[str]:
    lines = [
        f"backend: {variant(backend)}, because {_reason()}",
        f"device: {device_name()}; mlx {version('mlx')}; Python {sys.version.split()[0]}",
    ]
    blas = blas_line()
    return [*lines, blas] if blas else lines


def _reason() -> str:
    if "PAGED_KV_BACKEND" in os.environ:
        return "PAGED_KV_BACKEND names it"
    if mx.default_device().type == mx.gpu:
        return f"MLX computes on {mx.default_device()}"
    library, missing = load_native_library()
    if library is None:
        return f"MLX computes on a CPU, and of the CPU kernels {missing}"
    return "MLX computes on a CPU, and the CPU kernels run here"


def _result(check: Check) -> CheckResult:
    start = perf_counter()
    try:
        error = check.run()
        finding = f"off by {error:.1e}, at most {check.tolerance:.0e}"
        passed = error <= check.tolerance
    except Exception as failure:
        finding, passed = f"{type(failure).__name__}: {failure}", False
    return CheckResult(check, passed, finding, perf_counter() - start)
