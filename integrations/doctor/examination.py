"""Runs every kernel and compiled steps on this device, and leaves out what is wrong or slow."""

import os
import sys
from collections.abc import Iterable
from importlib.metadata import version
from time import perf_counter

import mlx.core as mx

from paged_kv.integrations.doctor import compiled_steps
from paged_kv.integrations.doctor.blas import blas_line
from paged_kv.integrations.doctor.kernel_times import KernelTime, kernel_times
from paged_kv.kernels.backends import choose_backend, variant, whole_backend
from paged_kv.kernels.cpu.native_library import load_native_library
from paged_kv.kernels.faster_steps import note_faster
from paged_kv.kernels.left_out import COMPILED_STEPS, device_name, leave_out
from paged_kv.kernels.self_test import Check, checks


def examine() -> int:
    """Print the backend, the device, the BLAS, and a line for each check and each time.

    What is wrong or slow is left out from now on; what an earlier examination found is not, unless
    it is found again.

    Returns:
        1 if a kernel or a compiled step was wrong, else 0.

    Raises:
        OSError: the file of what is left out cannot be written.
    """
    backend = whole_backend()
    print(f"backend: {variant(backend)}, because {_reason()}")
    print(f"device: {device_name()}; mlx {version('mlx')}; Python {sys.version.split()[0]}")
    if blas := blas_line():
        print(blas)
    wrong = _wrong(checks(backend))
    slow = {} if backend.name == "plain" else _slow(kernel_times(backend, without=wrong))
    leave_out(variant(backend), wrong | slow)
    # Factories have this backend from now on.
    if reason := compiled_steps.why_not(choose_backend()):
        note_faster(variant(backend), is_so=False)
        print(f"steps are not compiled: {reason}")
    else:
        wrong_steps = _wrong([compiled_steps.check()])
        times = [] if wrong_steps else [compiled_steps.time()]
        wrong, slow = wrong | wrong_steps, slow | _slow(times)
        note_faster(variant(backend), is_so=any(each.ratio < 1 for each in times))
        leave_out(variant(backend), wrong | slow)
    print(_verdict(wrong, slow))
    return 1 if wrong else 0


def _reason() -> str:
    if "PAGED_KV_BACKEND" in os.environ:
        return "PAGED_KV_BACKEND names it"
    if mx.default_device().type == mx.gpu:
        return f"MLX computes on {mx.default_device()}"
    library, missing = load_native_library()
    if library is None:
        return f"MLX computes on a CPU, and of the CPU kernels {missing}"
    return "MLX computes on a CPU, and the CPU kernels run here"


def _wrong(found: Iterable[Check]) -> dict[str, str]:
    """What the checks fail of, and what it did."""
    results = {check.name: _run(check) for check in found}
    return {name: said for name, (passed, said) in results.items() if not passed}


def _run(check: Check) -> tuple[bool, str]:
    """Run a check and print its line; its time includes compiling the kernel."""
    start = perf_counter()
    try:
        error = check.run()
        said = f"off by {error:.1e}, at most {check.tolerance:.0e}"
        passed = error <= check.tolerance
    except Exception as failure:
        said, passed = f"{type(failure).__name__}: {failure}", False
    milliseconds = 1000 * (perf_counter() - start)
    print(f"{'pass' if passed else 'FAIL'}  {check.name:<32} {milliseconds:9.1f} ms  {said}")
    return passed, said


def _slow(times: Iterable[KernelTime]) -> dict[str, str]:
    """What is slower than what it is compared with, and by how much."""
    slow = {}
    for each in times:
        print(f"{'SLOW' if each.is_slow else 'time'}  {each.name:<32} {each}")
        if each.is_slow:
            slow[each.name] = f"{each.ratio:.2f} times as long as {each.other}"
    return slow


def _verdict(wrong: dict[str, str], slow: dict[str, str]) -> str:
    lines = [f"{len(wrong)} of the checks failed" if wrong else "all checks passed"]
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
    if wrong or slow:
        lines.append(
            "`paged-kv doctor --reset` undoes this. Please report it: "
            "paged-kv doctor --report report.md"
        )
    return "\n".join(lines)
