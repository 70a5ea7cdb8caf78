"""Chooses the backend, the code that reads and writes pages on this device."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx

from paged_kv.kernels.cpu.native_backend import NativeBackend
from paged_kv.kernels.cpu.native_library import load_native_library
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.kernels.pages.number_format import KEY_FORMATS
from paged_kv.kernels.pages.page_format import LayerGeometry, PageLayout, page_format_named
from paged_kv.kernels.pages.self_test import Probe
from paged_kv.kernels.pages.verdicts import WrongKernel, verdicts_on


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
    """The best backend for this device, or the one that PAGED_KV_BACKEND names. The best one checks
    its kernels before they are used, unless PAGED_KV_CERTIFY is 0, and plain operations take its
    place once one is wrong.

    Raises:
        ValueError: PAGED_KV_CERTIFY is neither 0 nor 1; and see `device_backend`.
    """
    certifies = os.environ.get("PAGED_KV_CERTIFY", "1")
    if certifies not in ("0", "1"):
        raise ValueError(f"PAGED_KV_CERTIFY must be 0 or 1, got {certifies!r}")
    backend = device_backend()
    if "PAGED_KV_BACKEND" in os.environ or certifies == "0" or type(backend) is Backend:
        return backend
    backend.verdicts = verdicts_on(backend.variant, backend.build)
    return Backend() if backend.is_disabled else backend


def device_backend() -> Backend:
    """The best backend for this device, or the one that PAGED_KV_BACKEND names, whose kernels are
    used unchecked.

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


def backend_for(backend: Backend, geometry: LayerGeometry) -> Backend:
    """The backend for one layer: the given one if it supports the layer, else the plain one."""
    if not backend.supports(geometry):
        warn_once(
            f"no {backend.name} kernel takes layers of {geometry}: plain MLX operations serve "
            "them, which is correct but slower (stats() counts such layers)"
        )
        return Backend()
    if backend.verdicts is not None and isinstance(backend, NativeBackend):
        # One head and few tokens: it takes a few milliseconds. GPU kernels are checked one by one.
        one = replace(geometry, k_heads=1, v_heads=1)
        formats = tuple(name for name in KEY_FORMATS if _holds(name, one))
        probe, unchecked = Probe(one, formats, 2, batch=1), NativeBackend(backend.library)
        try:
            backend.verdicts.require([str(one)], probe.attend(unchecked, writes=True).failure)
        except WrongKernel:
            return Backend()
    return backend


def _holds(page_format: str, geometry: LayerGeometry) -> bool:
    try:
        PageLayout(page_format_named(page_format), geometry)
    except ValueError:
        return False
    return True


def _best() -> Backend:
    if mx.default_device().type == mx.gpu:
        return _on_gpu("metal" if mx.metal.is_available() else "cuda")
    library, reason = load_native_library()
    if library is None:
        warn_once(f"attention runs on plain MLX operations, which is slow on a CPU: {reason}")
        return Backend()
    return NativeBackend(library)
