"""Running GPU kernels on this CPU finds faults: each is planted into a correct kernel."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.gpu import arrays as gpu_arrays
from paged_kv.kernels.gpu import kernels as gpu_kernels
from paged_kv.kernels.gpu import text as gpu_text
from paged_kv.kernels.gpu import tuning as gpu_tuning
from paged_kv.kernels.pages import prefix_groups
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_memory import MAX_SLABS
from paged_kv.kernels.pages.layer_pages import LayerPages
from tests.support.gpu_on_cpu.toolchain import KernelError
from tests.support.gpu_pages import (
    STRIDE,
    TOLERANCES,
    Separately,
    backend_on,
    device_of,
    needs_compiler,
    same,
    sharing,
    written,
)
from tests.support.planted_centre_faults import CENTRE_FAULTS
from tests.support.planted_decode_faults import DECODE_FAULTS
from tests.support.planted_faults import BOTH, FAULTS, SHARING, Fault
from tests.support.planted_latent_faults import LATENT_FAULTS
from tests.support.planted_prefix_faults import PREFIX_FAULTS
from tests.support.planted_wide_faults import WIDE_FAULTS

# They fail if the emulation breaks, not if a kernel does.
pytestmark = [needs_compiler, pytest.mark.slow]

ORDERS = ("forward", "reverse", "shuffled")
# Tokens of a part that a simdgroup reads at least: contexts have one part.
WHOLE_CONTEXTS = 128
ALL_FAULTS = [*FAULTS, *DECODE_FAULTS, *LATENT_FAULTS, *PREFIX_FAULTS, *CENTRE_FAULTS, *WIDE_FAULTS]
SOUND: dict[str, Any] = dict.fromkeys(("name", "sound", "planted", "said"), "")
SOUND |= {"dialects": BOTH}
OWN_USE = ("latent", "copy")  # others only attend


@pytest.fixture(autouse=True)
def groups_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 1)


def _cases() -> list[Any]:
    return [
        pytest.param(
            fault,
            dialect,
            id=f"{dialect}: {fault.name}",
        )
        for fault in ALL_FAULTS
        for dialect in fault.dialects
    ]


def _set_least_tokens(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in both dialects, or contexts would be of one part in one of them alone."""
    least = fault.least_tokens or WHOLE_CONTEXTS
    monkeypatch.setattr(gpu_tuning, "LEAST_TOKENS", dict.fromkeys(BOTH, least))


def _plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the text of the kernels."""
    _set_least_tokens(fault, monkeypatch)
    if not fault.sound:
        more = tuple(f"slab{number}" for number in range(MAX_SLABS, 28))
        _bind_more(more, monkeypatch)
        return
    real, changed = gpu_text.source, set()

    def source(path: Path) -> str:
        if fault.sound in (text := real(path)):
            changed.add(path.stem)
        return text.replace(fault.sound, fault.planted)

    monkeypatch.setattr(gpu_text, "source", source)
    for dialect in fault.dialects:
        gpu_text.kernel_text(dialect, fault.operation, "float16", {}, ["STEP", "WHOLE"])
    assert changed


def _bind_more(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "OF_PAGES", (*names, *gpu_kernels.OF_PAGES))
    bind = gpu_arrays.bind

    def wider(*arguments: Any) -> Any:
        bound = bind(*arguments)
        return replace(bound, inputs=bound.inputs[:1] * len(names) + bound.inputs)

    monkeypatch.setattr(gpu_arrays, "bind", wider)


@pytest.mark.parametrize(("fault", "dialect"), _cases())
def test_each_fault_is_noticed(fault: Fault, dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(fault, monkeypatch)
    backend = backend_on(device_of(dialect, *ORDERS), dialect)
    if not fault.said:
        assert not _is_right(backend, fault)
        return
    with pytest.raises(KernelError) as raised:
        _use(backend, fault)
    assert fault.said in str(raised.value)


def _is_right(backend: Any, fault: Fault) -> bool:
    """Whether all numbers are present and right."""
    try:
        return _use(backend, fault) <= TOLERANCES[mx.float16]
    except AssertionError:  # Some are not finite.
        return False


def _use(backend: Any, fault: Fault) -> float:
    geometry, formats = same(fault.dim, fault.dtype), fault.formats
    if fault.operation == "latent":
        dim = 512 if fault.shares else 64
        latents = LayerGeometry(1, dim, fault.dtype, 1, 64, fault.dtype)
        if fault.shares:
            return sharing(backend, latents, ["fp16"] * 2, *SHARING).attend_latent(5)
        return written(backend, latents, formats, fault.lengths).attend_latent(5)
    if fault.shares:
        return sharing(backend, geometry, ["fp16"] * 2, *SHARING).attend(fault.queries)
    batch = written(backend, geometry, formats, fault.lengths, more=fault.writes)
    if fault.operation == "copy":
        return _bytes_that_differ(batch.pages)
    options: Any = {"gqa_group_size": fault.gqa_group_size, "softcap": fault.softcap}
    if not fault.writes:
        return batch.attend(fault.queries, **options)
    error = batch.write_and_attend(backend, **options)
    other = written(backend, geometry, formats, fault.lengths, more=True)
    other.write_and_attend(Separately(backend), **options)
    assert batch.bytes() == other.bytes()
    return error


def _bytes_that_differ(pages: LayerPages) -> float:
    """The share of them in a page of the second slab, to which the first page is copied."""
    expected = pages.layout_of(0).recoded(pages.page(0), pages.layout_of(STRIDE))
    pages.copy({0: STRIDE})
    return float(np.mean(np.asarray(pages.page(STRIDE)) != np.asarray(expected)))


@pytest.mark.parametrize("dialect", BOTH)
def test_the_sound_kernels_have_none(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every use in which a planted fault must show."""
    used = [
        replace(fault, **SOUND, operation=fault.operation if fault.operation in OWN_USE else "")
        for fault in ALL_FAULTS
    ]
    uses = {str(fault): fault for fault in used}
    assert len(uses) > 10
    for use in uses.values():
        _set_least_tokens(use, monkeypatch)
        backend = backend_on(device_of(dialect, *ORDERS), dialect)
        assert _use(backend, use) <= TOLERANCES[use.dtype]


def test_a_result_that_depends_on_the_order_is_noticed() -> None:
    """Threadgroups write one after the other, so a checker sees nothing."""
    device = device_of("metal", *ORDERS)
    kernel = device.metal_kernel(
        name="order",
        input_names=["slab0"],
        output_names=["done"],
        source="""
  device ushort* slab = const_cast<device ushort*>(slab0);
  if (thread_position_in_grid.x % 32 == 0) slab[0] = ushort(threadgroup_position_in_grid.x);
  if (threadgroup_position_in_grid.x == 0 && thread_index_in_threadgroup < 8)
    done[thread_index_in_threadgroup] = 0;
""",
    )
    with pytest.raises(KernelError, match=r"race|depend on the order"):
        kernel(
            inputs=[mx.arange(16).astype(mx.uint16)],
            template=[("N", 1)],
            grid=(128, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(8,)],
            output_dtypes=[mx.int32],
        )
