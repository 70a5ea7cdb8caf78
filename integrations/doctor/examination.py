"""Runs every kernel on this device, and leaves out those that are wrong or slow."""

import os
import sys
from importlib.metadata import version
from time import perf_counter

import mlx.core as mx

from paged_kv.integrations.doctor.blas import blas_line
from paged_kv.integrations.doctor.kernel_times import kernel_times
from paged_kv.kernels.backends import variant, whole_backend
from paged_kv.kernels.cpu.native_library import load_native_library
from paged_kv.kernels.left_out import device_name, leave_out
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.self_test import Check, checks


def examine() -> int:
    """Print the backend, the device, the BLAS, and a line for each check and each time.

    Kernels that are wrong or slow are left out from now on; those of an earlier examination are
    not, unless they are found again.

    Returns:
        1 if a kernel was wrong, else 0.

    Raises:
        OSError: the file of kernels that are left out cannot be written.
    """
    backend = whole_backend()
    print(f"backend: {variant(backend)}, because {_reason()}")
    print(f"device: {device_name()}; mlx {version('mlx')}; Python {sys.version.split()[0]}")
    if blas := blas_line():
        print(blas)
    wrong = _wrong(backend)
    slow = {} if backend.name == "plain" else _slow(backend, wrong)
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


def _wrong(backend: Backend) -> dict[str, str]:
    """The kernels whose checks fail, and what they did."""
    results = {check.name: _run(check) for check in checks(backend)}
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


def _slow(backend: Backend, wrong: dict[str, str]) -> dict[str, str]:
    """The kernels that are slower than plain operations, and by how much."""
    slow = {}
    for each in kernel_times(backend, without=wrong):
        print(f"{'SLOW' if each.is_slow else 'time'}  {each.name:<32} {each}")
        if each.is_slow:
            slow[each.name] = f"{each.ratio:.2f} times as long as plain operations"
    return slow


def _verdict(wrong: dict[str, str], slow: dict[str, str]) -> str:
    lines = [f"{len(wrong)} of the checks failed" if wrong else "all checks passed"]
    if slow:
        lines.append(f"slower than plain operations: {', '.join(slow)}")
    if wrong or slow:
        lines.append(
            "plain operations stand in for these kernels from now on, unless PAGED_KV_BACKEND "
            "names a backend; `paged-kv doctor --reset` uses them again. Please report it: "
            "paged-kv doctor --report report.md"
        )
    return "\n".join(lines)
