"""What a backend does with the pages of a layer, and the choice of one.

A backend alone decides how a write reaches a slab and what later reads must wait for, so no code
outside this room touches page memory.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from paged_kv.kernels.gpu_backend import GpuBackend
from paged_kv.kernels.gpu_kernels import Maker
from paged_kv.kernels.layer_geometry import LayerGeometry
from paged_kv.kernels.native_backend import NativeBackend
from paged_kv.kernels.native_library import load_native_library
from paged_kv.kernels.page_rows import PageRows, Tail
from paged_kv.kernels.plain_backend import PlainBackend
from paged_kv.kernels.say_once import say_once

if TYPE_CHECKING:
    from paged_kv.kernels.layer_pages import LayerPages


class Backend(Protocol):
    """Operations on the pages of one layer. B rows, S new tokens, T tokens in all."""

    @property
    def name(self) -> str: ...

    @property
    def fallbacks(self) -> int:
        """How often plain MLX operations had to do what a kernel could not."""
        ...

    @property
    def writes_in_place(self) -> bool:
        """Whether an array that was read lazily, and is computed after a write, shows it."""
        ...

    def supports(self, geometry: LayerGeometry) -> bool:
        """Whether the other operations work on the pages of such a layer, whatever their format."""
        ...

    def new_slab(self, pages: int, page_units: int, unit_words: int) -> mx.array:
        """Memory for `pages` pages, uint16 [pages * page_units, unit_words].

        Raises:
            MemoryError: the machine has not that much.
        """
        ...

    def begin(self, *arrays: mx.array) -> None:
        """Begin to compute what a write will wait for, if it does wait: any thread can then."""
        ...

    def write(self, pages: "LayerPages", keys: mx.array, values: mx.array, rows: PageRows) -> None:
        """Write a step of keys [B, k_heads, S, k_dim] and values [B, v_heads, S, v_dim], without
        its padding, as the last of each row's tokens."""
        ...

    def load(self, pages: "LayerPages", contents: Mapping[int, mx.array]) -> None:
        """Fill whole pages (entry: uint16 [page_units, unit_words])."""
        ...

    def copy(self, pages: "LayerPages", copies: Mapping[int, int]) -> None:
        """Copy whole pages (from entry, to entry) of one format. No entry is both."""
        ...

    def convert(self, pages: "LayerPages", copies: Mapping[int, int]) -> None:
        """Copy whole pages (from entry, to entry) into pages of other formats."""
        ...

    def gather(
        self, pages: "LayerPages", rows: PageRows, tail: Tail | None
    ) -> tuple[mx.array, mx.array]:
        """Keys [B, k_heads, T, k_dim] and values [B, v_heads, T, v_dim], T the longest context
        with its right padding. Rows end at T, and padding is zeros. Lazy."""
        ...

    def settle(self, pages: "LayerPages") -> None:
        """Wait until all that was asked of the pages is done, so that others may look at them."""
        ...

    def attend(
        self,
        pages: "LayerPages",
        queries: mx.array,
        rows: PageRows,
        *,
        scale: float,
        causal: bool,
        window: int | None,
        sinks: mx.array | None,
        tail: Tail | None,
    ) -> mx.array:
        """Attention of a step of queries [B, q_heads, S, k_dim], over all tokens of their rows;
        [B, q_heads, S, v_dim], finite where the step is padding.

        `causal` hides later tokens; `window` hides them too, and those that are `window` or more
        positions back.
        `sinks` [q_heads] are logits of one more key without a value.
        """
        ...

    def write_and_attend(
        self,
        pages: "LayerPages",
        step: Tail,
        queries: mx.array,
        rows: PageRows,
        *,
        scale: float,
        causal: bool,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """`write` a step, and `attend` to all tokens with its queries, at less than both cost."""
        ...


def _native() -> Backend:
    library, reason = load_native_library()
    if library is None:
        raise ValueError(
            f"PAGED_KV_BACKEND is 'native', and there is no native library: {reason}. Install a "
            "C++ compiler and paged-kv again (pip install --force-reinstall --no-deps paged-kv)"
        )
    return NativeBackend(library)


def _metal() -> Backend:
    return GpuBackend("metal", _on_gpu("metal", mx.metal.is_available(), mx.fast.metal_kernel))


def _cuda() -> Backend:
    return GpuBackend("cuda", _on_gpu("cuda", mx.cuda.is_available(), mx.fast.cuda_kernel))


def _on_gpu(name: str, is_there: bool, maker: Maker) -> Maker:
    """The maker of kernels, where MLX computes on such a GPU."""
    if not is_there or mx.default_device().type != mx.gpu:
        device = f"computes on {mx.default_device()}" if is_there else f"has no {name} here"
        raise ValueError(
            f"PAGED_KV_BACKEND is {name!r}, and MLX {device}. Unset it, or let MLX compute on such "
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
    """The best backend for this device, or the one that PAGED_KV_BACKEND names.

    Raises:
        ValueError: PAGED_KV_BACKEND names none, or one that is not there; or another variable
            that a backend reads is wrong.
    """
    name = os.environ.get("PAGED_KV_BACKEND")
    if name is None:
        return _best()
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ValueError(f"PAGED_KV_BACKEND must be one of {known}, got {name!r}")
    return BACKENDS[name]()


def backend_for(backend: Backend, geometry: LayerGeometry) -> Backend:
    """The backend for one layer's pages: the given one, or the plain one where that cannot."""
    if backend.supports(geometry):
        return backend
    say_once(
        f"no {backend.name} kernel takes layers of {geometry}: MLX's own operations serve them, "
        "which is right but slower (stats() counts such layers)"
    )
    return PlainBackend()


def _best() -> Backend:
    if mx.default_device().type == mx.gpu:
        return _metal() if mx.metal.is_available() else _cuda()
    library, reason = load_native_library()
    if library is None:
        say_once(f"attention runs on MLX's own operations, which is slow on a CPU: {reason}")
        return PlainBackend()
    return NativeBackend(library)
