"""Chooses the backend, the code that reads and writes pages on this device, and remembers what
`paged-kv doctor` found of the backends here.

A file in the cache folder holds that. A verdict holds for the device and the versions it was found
with: a later version may be right.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from paged_kv.kernels.cpu.native_backend import NativeBackend
from paged_kv.kernels.cpu.native_library import load_native_library
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.kernels.pages.page_format import LayerGeometry


def _native() -> Backend:
    library, reason = load_native_library()
    if library is None:
        raise ValueError(
            f"PAGED_KV_BACKEND is 'native', but there is no native library: {reason}. Install a "
            "C++ compiler, then paged-kv again (pip install --force-reinstall --no-deps paged-kv)"
        )
    return NativeBackend(library)


def _on_gpu(name: str) -> Backend:
    is_there = getattr(mx, name).is_available()
    if not is_there or mx.default_device().type != mx.gpu:
        device = f"computes on {mx.default_device()}" if is_there else f"has no {name} here"
        raise ValueError(
            f"PAGED_KV_BACKEND is {name!r}, but MLX {device}. Unset it, or let MLX compute on such "
            "a GPU (mx.set_default_device(mx.gpu))"
        )
    return GpuBackend(name, getattr(mx.fast, f"{name}_kernel"))


BACKENDS: dict[str, Callable[[], Backend]] = {
    "plain": Backend,
    "native": _native,
    "metal": partial(_on_gpu, "metal"),
    "cuda": partial(_on_gpu, "cuda"),
}


def choose_backend() -> Backend:
    """The best backend for this device, or the one that PAGED_KV_BACKEND names; plain operations
    in the place of one that `paged-kv doctor` found wrong, unless it is named.

    Raises:
        ValueError: see `device_backend`.
    """
    backend = device_backend()
    verdict = None if "PAGED_KV_BACKEND" in os.environ else verdict_on(variant(backend))
    if verdict is None or not verdict.disabled:
        return backend
    warn_once(
        f"the {variant(backend)} kernels are disabled, and plain MLX operations serve everything: "
        "some were found wrong on this device. `paged-kv doctor` says which, and looks again; "
        "`paged-kv doctor --reset` uses them"
    )
    return Backend()


def device_backend() -> Backend:
    """The best backend for this device, or the one that PAGED_KV_BACKEND names, even if
    it is disabled.

    Raises:
        ValueError: PAGED_KV_BACKEND names no backend, or one that is missing here; or another
            environment variable of the backend is wrong.
    """
    name = os.environ.get("PAGED_KV_BACKEND")
    if name is None:
        return _best()
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ValueError(f"PAGED_KV_BACKEND must be one of {known}, got {name!r}")
    return BACKENDS[name]()


def variant(backend: Backend) -> str:
    """The backend's name; for the CPU kernels with their instruction set, "native (avx2)"."""
    if isinstance(backend, NativeBackend):
        return f"{backend.name} ({backend.library.instruction_set})"
    return backend.name


def backend_for(backend: Backend, geometry: LayerGeometry) -> Backend:
    """The backend for one layer: the given one if it supports the layer, else the plain one."""
    if backend.supports(geometry):
        return backend
    warn_once(
        f"no {backend.name} kernel takes layers of {geometry}: plain MLX operations serve them, "
        "which is correct but slower (stats() counts such layers)"
    )
    return Backend()


def _best() -> Backend:
    if mx.default_device().type == mx.gpu:
        return _on_gpu("metal" if mx.metal.is_available() else "cuda")
    library, reason = load_native_library()
    if library is None:
        warn_once(f"attention runs on plain MLX operations, which is slow on a CPU: {reason}")
        return Backend()
    return NativeBackend(library)


@dataclass(frozen=True)
class Verdict:
    """What the doctor found of a backend.

    Attributes:
        disabled: whether a kernel is wrong, so that plain operations serve everything.
    """

    disabled: bool


def verdict_on(variant: str) -> Verdict | None:
    """The latest verdict on a backend; None if the doctor has not examined it here.

    Args:
        variant: of the backend, such as "metal" or "native (avx2)".
    """
    return _read().get(_key(variant))


def record_verdict(variant: str, verdict: Verdict) -> None:
    """Let a verdict hold from now on. Other processes read all of the file or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    file = verdict_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    verdicts = _read() | {_key(variant): verdict}
    temporary.write_text(json.dumps({key: asdict(each) for key, each in verdicts.items()}))
    temporary.replace(file)


def forget_verdicts() -> None:
    """Use all backends again.

    Raises:
        OSError: the file cannot be deleted.
    """
    verdict_file().unlink(missing_ok=True)


def verdict_file() -> Path:
    """verdicts.json in the folder paged-kv of $XDG_CACHE_HOME, or of ~/.cache."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "paged-kv" / "verdicts.json"


def device_name() -> str:
    """What MLX calls the device that it computes on."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device())


def _key(variant: str) -> str:
    try:
        mlx_lm = version("mlx-lm")
    except PackageNotFoundError:
        mlx_lm = "none"
    versions = f"mlx {version('mlx')}, mlx-lm {mlx_lm}, paged_kv {version('paged-kv')}"
    return f"{variant} on {device_name()}, {versions}"


def _read() -> dict[str, Verdict]:
    file = verdict_file()
    try:
        return {
            key: Verdict(each["disabled"]) for key, each in json.loads(file.read_text()).items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        warn_once(f"{file} cannot be read, so no backend is disabled: {error}")
        return {}
