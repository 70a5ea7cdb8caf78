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
from paged_kv.kernels.pages import tables as tables_module
from paged_kv.kernels.pages.layer_memory import MAX_SLABS
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import LayerGeometry
from tests.support.gpu_on_cpu.toolchain import KernelError
from tests.support.gpu_pages import (
    STRIDE,
    TOLERANCES,
    backend_on,
    device_of,
    needs_compiler,
    same,
    sharing,
    step_error,
    written,
)
from tests.support.planted_faults import DIALECTS, FAULTS, SHARING, Fault, Use

# They fail if the emulation breaks, not if a kernel does.
pytestmark = [needs_compiler, pytest.mark.slow]

# Tokens of a part that a simdgroup reads at least: contexts have one part.
WHOLE_CONTEXTS = 128


@pytest.fixture(autouse=True)
def groups_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "LEAST_SAVED", 1)


def _case(values: tuple[Any, str], name: str, often: bool) -> Any:
    """All but one of each kind are left to the soak."""
    marks = [] if often else [pytest.mark.soak]
    return pytest.param(*values, id=f"{values[1]}: {name}", marks=marks)


def _set_least_tokens(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in both dialects, or contexts would be of one part in one of them alone."""
    least = use.least or WHOLE_CONTEXTS
    monkeypatch.setattr(gpu_tuning, "LEAST_TOKENS", dict.fromkeys(DIALECTS, least))


def _plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Change the text of the kernels; the returned set grows by the names of changed ones."""
    if not fault.sound:
        _bind_more(tuple(f"slab{number}" for number in range(MAX_SLABS, 28)), monkeypatch)
        return {"every text"}
    real, changed = gpu_text.source, set()

    def source(path: Path) -> str:
        if fault.sound in (text := real(path)):
            changed.add(path.stem)
        return text.replace(fault.sound, fault.planted)

    monkeypatch.setattr(gpu_text, "source", source)
    return changed


def _bind_more(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "OF_PAGES", (*names, *gpu_kernels.OF_PAGES))
    bind = gpu_arrays.bind

    def wider(*arguments: Any) -> Any:
        bound = bind(*arguments)
        return replace(bound, inputs=bound.inputs[:1] * len(names) + bound.inputs)

    monkeypatch.setattr(gpu_arrays, "bind", wider)


@pytest.mark.parametrize(
    ("fault", "dialect"),
    [
        _case((fault, dialect), fault.name, fault.often == dialect)
        for fault in FAULTS
        for dialect in fault.dialects
    ],
)
def test_each_fault_is_noticed(fault: Fault, dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_least_tokens(fault.use, monkeypatch)
    changed = _plant(fault, monkeypatch)
    backend = backend_on(device_of(dialect), dialect)
    if fault.said:
        with pytest.raises(KernelError) as raised:
            _error(backend, fault.use)
        assert fault.said in str(raised.value)
    else:
        assert not _is_right(backend, fault.use)
    assert changed


def _is_right(backend: Any, use: Use) -> bool:
    """Whether all numbers are present and right."""
    try:
        return _error(backend, use) <= TOLERANCES[mx.float16]
    except AssertionError:  # Some are not finite.
        return False


def _error(backend: Any, use: Use) -> float:
    dtype = mx.bfloat16 if use.bfloat16 else mx.float16
    geometry, formats = same(use.dim, dtype), use.formats
    if use.latent:
        latents = LayerGeometry(1, 512 if use.shares else 64, dtype, 1, 64, dtype)
        if use.shares:
            return sharing(backend, latents, ["fp16"] * 2, *SHARING).attend_latent(5)
        return written(backend, latents, formats, use.lengths).attend_latent(5)
    if use.shares:
        return sharing(backend, geometry, ["fp16"] * 2, *SHARING).attend(use.queries)
    batch = written(backend, geometry, formats, use.lengths)
    if use.copy:
        return _bytes_that_differ(batch.pages)
    options: Any = {"gqa_group_size": use.gqa, "softcap": use.softcap}
    if use.writes:
        return step_error(backend, geometry, formats, use.lengths, **options)
    return batch.attend(use.queries, **options)


def _bytes_that_differ(pages: LayerPages) -> float:
    """The share of them in a page of the second slab, to which the first page is copied."""
    expected = pages.layout_of(0).recoded(pages.page(0), pages.layout_of(STRIDE))
    pages.copy({0: STRIDE})
    return float(np.mean(np.asarray(pages.page(STRIDE)) != np.asarray(expected)))


USES = {(fault.use, dialect) for fault in FAULTS for dialect in fault.dialects}
FREQUENT = {(fault.use, fault.often) for fault in FAULTS}


@pytest.mark.parametrize(
    ("use", "dialect"),
    [_case(each, str(each[0]), each in FREQUENT) for each in sorted(USES, key=str)],
)
def test_the_sound_kernels_have_none(
    use: Use, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_least_tokens(use, monkeypatch)
    backend = backend_on(device_of(dialect), dialect)
    assert _error(backend, use) <= TOLERANCES[mx.bfloat16 if use.bfloat16 else mx.float16]


def test_a_result_that_depends_on_the_order_is_noticed() -> None:
    """Threadgroups write one after the other, so a checker sees nothing."""
    device = device_of("metal", "forward", "reverse", "shuffled")
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
