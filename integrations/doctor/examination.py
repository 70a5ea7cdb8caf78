"""Runs every kernel and compiled steps on this device, leaves out what is wrong or slow, and says
what it found."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from time import perf_counter

import mlx.core as mx

from paged_kv.blas_in_use import library_in_use, openblas_version
from paged_kv.integrations.doctor import compiled_steps
from paged_kv.integrations.doctor.kernel_times import KernelTime, kernel_times
from paged_kv.kernels.backends import choose_backend, variant, whole_backend
from paged_kv.kernels.cpu.native_library import load_native_library
from paged_kv.kernels.faster_steps import note_faster
from paged_kv.kernels.left_out import COMPILED_STEPS, device_name, leave_out
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.partial_backend import operation_of
from paged_kv.kernels.self_test import Check, checks
from paged_kv.openblas import how_to_get_openblas


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes:
        name: the check's.
        passed: whether its error is within the tolerance.
        finding: the error, or the exception that it raised.
        seconds: how long it took; this includes compiling the kernel.
    """

    name: str
    passed: bool
    finding: str
    seconds: float

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        return f"{verdict}  {self.name:<32} {1e3 * self.seconds:9.1f} ms  {self.finding}"


@dataclass
class Findings:
    """All that an examination found.

    Attributes:
        system: lines about the backend, the device, the BLAS and compiled steps.
        checks: the results of checks, in the order that they ran in.
        times: the times, in that order too.
    """

    system: list[str] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)
    times: list[KernelTime] = field(default_factory=list)

    @property
    def wrong(self) -> dict[str, str]:
        """The names of what is wrong, and what its check said."""
        return {each.name: each.finding for each in self.checks if not each.passed}

    @property
    def slow(self) -> dict[str, str]:
        """The names of what is slower than what it is compared with, and by how much."""
        return {
            each.name: f"{each.ratio:.2f} times as long as {each.other}"
            for each in self.times
            if each.is_slow
        }

    def summary(self) -> str:
        """The verdict, what is wrong or slow in full, the system, and a line for each group."""
        problems = [
            *(str(each) for each in self.checks if not each.passed),
            *(str(each) for each in self.times if each.is_slow),
        ]
        parts = _verdict(self), problems, self.system, self._groups()
        return "\n\n".join("\n".join(part) for part in parts if part)

    def details(self) -> str:
        """A line for each check and each time."""
        return "\n".join(map(str, (*self.checks, *self.times)))

    def _groups(self) -> list[str]:
        """A line for each operation: how many of its checks passed, and its speed."""
        checks: defaultdict[str, list[CheckResult]] = defaultdict(list)
        times: defaultdict[str, list[KernelTime]] = defaultdict(list)
        for result in self.checks:
            checks[_group(result.name)].append(result)
        for time in self.times:
            times[_group(time.name)].append(time)
        return [
            f"{group:<18}  {_right(checks[group]):<12}  {_speed(times[group])}".rstrip()
            for group in dict.fromkeys((*checks, *times))
        ]


def _group(name: str) -> str:
    return name if name == COMPILED_STEPS else operation_of(name)


def _right(checks: list[CheckResult]) -> str:
    return f"{sum(each.passed for each in checks)} of {len(checks)} right" if checks else ""


def _speed(times: list[KernelTime]) -> str:
    if not times:
        return ""
    speeds = sorted({_rounded(1 / each.ratio) for each in times}, key=float)
    span = " to ".join(dict.fromkeys((speeds[0], speeds[-1])))
    return f"{span} times as fast as {times[0].other}"


def _rounded(number: float) -> str:
    return f"{number:.1f}" if number < 10 else f"{number:.0f}"


def _verdict(found: Findings) -> list[str]:
    """Whether all is right, what is left out, and what to do."""
    wrong, slow = found.wrong, found.slow
    if not (wrong or slow):
        return ["all checks passed, and nothing is left out"]
    lines = [f"{len(wrong)} of {len(found.checks)} checks failed" if wrong else "all checks passed"]
    kernels = [name for name in wrong | slow if name != COMPILED_STEPS]
    if slow_kernels := [name for name in slow if name in kernels]:
        lines.append(f"slower than plain operations: {', '.join(slow_kernels)}")
    if kernels:
        lines.append(
            "plain operations stand in for these kernels from now on, unless PAGED_KV_BACKEND "
            "names a backend"
        )
    if COMPILED_STEPS in wrong | slow:
        lines.append(
            "steps are not compiled from now on, unless a factory or PAGED_KV_COMPILE asks for it"
        )
    lines.append(
        "`paged-kv doctor --reset` undoes this. Please report it: "
        "paged-kv doctor --report report.md"
    )
    return lines


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
    """Run all checks, and time what is right.

    What is wrong or slow is left out from now on; what an earlier examination found is not, unless
    it is found again.

    Args:
        tell: takes each line as soon as it is found, so that somebody who waits sees where a
            device hangs.

    Raises:
        OSError: the file of what is left out cannot be written.
    """
    backend = whole_backend()
    found = Findings(_system(backend))
    for line in found.system:
        tell(line)
    _check(checks(backend), found, tell)
    if backend.name != "plain":
        _time(kernel_times(backend, without=found.wrong), found, tell)
    leave_out(variant(backend), found.wrong | found.slow)
    # Factories have this backend from now on.
    if reason := compiled_steps.why_not(choose_backend()):
        note_faster(variant(backend), is_so=False)
        found.system.append(f"steps are not compiled: {reason}")
        tell(found.system[-1])
    else:
        _examine_steps(variant(backend), found, tell)
    return found


def _examine_steps(backend: str, found: Findings, tell: Callable[[object], None]) -> None:
    check = compiled_steps.check()
    _check([check], found, tell)
    if is_right := check.name not in found.wrong:
        _time([compiled_steps.time()], found, tell)
    note_faster(backend, is_so=is_right and found.times[-1].ratio < 1)
    leave_out(backend, found.wrong | found.slow)


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


def _check(these: Iterable[Check], found: Findings, tell: Callable[[object], None]) -> None:
    for check in these:
        found.checks.append(_result(check))
        tell(found.checks[-1])


def _time(these: Iterable[KernelTime], found: Findings, tell: Callable[[object], None]) -> None:
    for time in these:
        found.times.append(time)
        tell(time)


def _result(check: Check) -> CheckResult:
    start = perf_counter()
    try:
        error = check.run()
        finding = f"off by {error:.1e}, at most {check.tolerance:.0e}"
        passed = error <= check.tolerance
    except Exception as failure:
        finding, passed = f"{type(failure).__name__}: {failure}", False
    return CheckResult(check.name, passed, finding, perf_counter() - start)
