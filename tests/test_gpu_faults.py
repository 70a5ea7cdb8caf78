"""What runs GPU kernels on this CPU notices faults: each is planted into a kernel that is sound."""

from typing import Any

import mlx.core as mx
import pytest

from paged_kv.kernels import gpu_arrays, gpu_kernels, gpu_text
from tests.gpu_on_cpu.toolchain import KernelError
from tests.gpu_pages import TOLERANCES, backend_on, device_of, needs_compiler, same, written
from tests.planted_faults import BOTH, FAULTS, Fault

# They fail when what runs kernels breaks, and not when a kernel does.
pytestmark = [needs_compiler, pytest.mark.slow]

ORDERS = ("forward", "reverse", "shuffled")


def _cases() -> list[Any]:
    return [
        pytest.param(
            fault,
            dialect,
            id=f"{dialect}: {fault.name}",
        )
        for fault in FAULTS
        for dialect in fault.dialects
    ]


def _plant(fault: Fault, dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the text that kernels are made of."""
    if not fault.sound:
        more = tuple(f"slab{number}" for number in range(gpu_kernels.SLABS, 28))
        _bind_more(more, monkeypatch)
        return
    body, header = gpu_text.body, gpu_text.header
    whole = header(dialect, fault.operation) + body(dialect, fault.operation)
    assert fault.sound in whole
    for name, real in (("body", body), ("header", header)):

        def planted(of: str, operation: str, real: Any = real) -> str:
            text: str = real(of, operation)
            if operation == fault.operation:
                text = text.replace(fault.sound, fault.planted)
            return text

        monkeypatch.setattr(f"paged_kv.kernels.gpu_kernels.{name}", planted)


def _bind_more(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "OF_PAGES", (*names, *gpu_kernels.OF_PAGES))
    bind = gpu_arrays.bind

    def wider(slabs: Any) -> Any:
        bound = bind(slabs)
        object.__setattr__(bound, "memory", bound.memory[:1] * len(names) + bound.memory)
        return bound

    monkeypatch.setattr(gpu_arrays, "bind", wider)


@pytest.mark.parametrize(("fault", "dialect"), _cases())
def test_each_fault_is_noticed(fault: Fault, dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(fault, dialect, monkeypatch)
    backend = backend_on(device_of(dialect, *ORDERS), dialect)
    if not fault.said:
        assert not _is_right(backend, fault)
        return
    with pytest.raises(KernelError) as raised:
        _use(backend, fault)
    assert fault.said in str(raised.value)


def _is_right(backend: Any, fault: Fault) -> bool:
    """Whether all numbers are there, and right."""
    try:
        return _use(backend, fault) <= TOLERANCES[mx.float16]
    except AssertionError:  # some are not finite
        return False


def _use(backend: Any, fault: Fault) -> float:
    batch = written(backend, same(64, fault.dtype), ["fp16"], [70, 33])
    return batch.attend(fault.queries)


def test_the_sound_kernels_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for dialect in BOTH:
        backend = backend_on(device_of(dialect, *ORDERS), dialect)
        for queries in (1, 9):
            fault = Fault("none", "decode", "", "", queries=queries)
            assert _use(backend, fault) <= TOLERANCES[mx.float16]


def test_a_result_that_depends_on_the_order_is_noticed() -> None:
    """Threadgroups that write one after the other, with nothing that a checker could see."""
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
