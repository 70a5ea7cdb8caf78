"""Chooses the backend, the code that reads and writes pages on this device."""

import os
from collections.abc import Callable

import mlx.core as mx

from paged_kv.kernels.cpu.native_backend import NativeBackend
from paged_kv.kernels.cpu.native_library import load_native_library
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.gpu.kernels import Maker
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.warn_once import warn_once
from paged_kv.kernels.plain.plain_backend import PlainBackend
from paged_kv.kernels.verdicts import verdict_on


def _native() -> Backend:
    library, reason = load_native_library()
    if library is None:
        raise ValueError(
            f"PAGED_KV_BACKEND is 'native', but there is no native library: {reason}. Install a "
            "C++ compiler, then paged-kv again (pip install --force-reinstall --no-deps paged-kv)"
        )
    return NativeBackend(library)


def _metal() -> Backend:
    return GpuBackend("metal", _on_gpu("metal", mx.metal.is_available(), mx.fast.metal_kernel))


def _cuda() -> Backend:
    return GpuBackend("cuda", _on_gpu("cuda", mx.cuda.is_available(), mx.fast.cuda_kernel))


def _on_gpu(name: str, is_there: bool, maker: Maker) -> Maker:
    """Return `maker` if MLX computes on such a GPU; raise a ValueError otherwise."""
    if not is_there or mx.default_device().type != mx.gpu:
        device = f"computes on {mx.default_device()}" if is_there else f"has no {name} here"
        raise ValueError(
            f"PAGED_KV_BACKEND is {name!r}, but MLX {device}. Unset it, or let MLX compute on such "
            "a GPU (mx.set_default_device(mx.gpu))"
        )
    return maker


BACKENDS: dict[str, Callable[[], Backend]] = {
    "plain": PlainBackend,
    "native": _native,
    "metal": _metal,
    "cuda": _cuda,
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
    return PlainBackend()


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
    return PlainBackend()


def _best() -> Backend:
    if mx.default_device().type == mx.gpu:
        return _metal() if mx.metal.is_available() else _cuda()
    library, reason = load_native_library()
    if library is None:
        warn_once(f"attention runs on plain MLX operations, which is slow on a CPU: {reason}")
        return PlainBackend()
    return NativeBackend(library)
