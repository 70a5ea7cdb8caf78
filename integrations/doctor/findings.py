"""What an examination found, as the lines that `paged-kv doctor` prints."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from paged_kv.integrations.doctor.kernel_times import KernelTime
from paged_kv.kernels.left_out import COMPILED_STEPS
from paged_kv.kernels.partial_backend import operation_of


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes:
        name: the check's.
        passed: whether its error is within the tolerance.
        said: the error, or the exception that it raised.
        seconds: how long it took; this includes compiling the kernel.
    """

    name: str
    passed: bool
    said: str
    seconds: float

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        return f"{verdict}  {self.name:<32} {1e3 * self.seconds:9.1f} ms  {self.said}"


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
        return {each.name: each.said for each in self.checks if not each.passed}

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
