"""Runs every kernel on this machine once and compares its results with a reference."""

import os
import sys
from importlib.metadata import version
from time import perf_counter

import mlx.core as mx

from paged_kv.kernels.backends import choose_backend
from paged_kv.kernels.cpu.native_backend import NativeBackend
from paged_kv.kernels.cpu.native_library import load_native_library
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.self_test import Check, checks


def examine() -> int:
    """Print the backend, the device and a line for each check; return 1 if any failed, else 0."""
    backend = choose_backend()
    print(f"backend: {_name(backend)}, because {_reason()}")
    print(f"device: {_device()}; mlx {version('mlx')}; Python {sys.version.split()[0]}")
    failed = sum([not _report(check) for check in checks(backend)])
    print(f"{failed} of the checks failed" if failed else "all checks passed")
    return 1 if failed else 0


def _name(backend: Backend) -> str:
    """The backend's name; for the CPU kernels with their instruction set."""
    if isinstance(backend, NativeBackend):
        return f"{backend.name} ({backend.library.instruction_set})"
    return backend.name


def _reason() -> str:
    if "PAGED_KV_BACKEND" in os.environ:
        return "PAGED_KV_BACKEND names it"
    if mx.default_device().type == mx.gpu:
        return f"MLX computes on {mx.default_device()}"
    library, missing = load_native_library()
    if library is None:
        return f"MLX computes on a CPU, and of the CPU kernels {missing}"
    return "MLX computes on a CPU, and the CPU kernels run here"


def _device() -> str:
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device())


def _report(check: Check) -> bool:
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
    return passed
