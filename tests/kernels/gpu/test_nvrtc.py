"""NVIDIA's own compiler accepts the CUDA text, where its wheels are installed."""

from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import pytest

from benches.cuda_texts import kernel_text
from paged_kv.kernels.pages import tables as tables_module
from paged_kv.kernels.pages.attention_metadata import Attention
from paged_kv.kernels.pages.page_format import FormatName, LayerGeometry
from tests.support.gpu_on_cpu.emulated import Device
from tests.support.gpu_on_cpu.nvrtc import compiled, local_bytes, why_not
from tests.support.gpu_on_cpu.toolchain import why_not as why_not_on_cpu
from tests.support.gpu_pages import STRIDE, backend_on, same, sharing, written

REASON = why_not() or why_not_on_cpu()
# The addresses that a kernel chooses among: of 16 slabs, layouts, tables and parameters. A thread
# keeps no other array in memory, as it would an array that a loop which is not unrolled indexes.
OF_SLABS = (16 + 3) * 8


FORMATS: list[list[FormatName]] = [["fp16"], ["q8"], ["q4"], ["fp16", "q4"]]


def cases(dims: list[int], *often: tuple[int, list[FormatName]]) -> list[Any]:
    """All sizes of heads with all formats; those that are not named are left to the soak."""
    return [
        pytest.param(*case, marks=[] if case in often else pytest.mark.soak)
        for case in product(dims, FORMATS)
    ]


def assert_compiles(device: Device) -> None:
    """All of its texts, with all sums in registers."""
    for name, text in device.texts.items():
        code, log = compiled(text, "sm_80")
        assert code, f"{name}: {log}"
        assert local_bytes(log) <= OF_SLABS, f"{name}: {log}"


needs_both = pytest.mark.skipif(bool(REASON), reason=REASON or "there are both")


@needs_both
@pytest.mark.slow
@pytest.mark.parametrize(("dim", "formats"), cases([96, 128, 256, 512], (128, ["fp16", "q4"])))
def test_kernels_of_heads_compile(
    dim: int, formats: list[FormatName], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16. The bench's texts, below, are in float16."""
    dtype = mx.bfloat16
    monkeypatch.setattr(tables_module, "LEAST_SAVED", 1)
    device = Device(modes=())  # The test makes texts, and runs no kernel.
    backend = backend_on(device, "cuda")
    geometry = replace(same(dim, dtype, heads=1), has_summaries=True)
    batch = written(backend, geometry, formats, [1300], more=True)
    pages, metadata = batch.pages, batch.metadata
    step = (mx.zeros((1, 1, 1, dim), dtype),) * 2
    one, two = (mx.zeros((1, 8, queries, dim), dtype) for queries in (1, 2))
    for attention in (Attention(1.0), Attention(1.0, sinks=mx.zeros((8,)))):
        pages.attend(one, metadata, attention)
        pages.attend(two, metadata, attention)
        backend.attend(pages, one, metadata, attention, step=step)
    pages.attend(one, metadata, Attention(1.0), unwritten=step)
    pages.attend(one, metadata, Attention(1.0, read_tokens=768))
    behind = sharing(backend, geometry, formats, [(0, 1), (0, 2)], [300, 300])
    for asked in (one, two):
        behind.pages.attend(mx.repeat(asked, 2, axis=0), behind.metadata, Attention(1.0))
    assert any("in_groups" in name for name in device.texts)
    pages.gather(metadata)
    pages.gather(metadata, step)
    backend.summarise(pages, [STRIDE * len(formats)])
    pages.write(*step, metadata)
    pages.copy({0: 1})
    operations = {name.split("_")[4] for name in device.texts}
    assert operations >= {"write", "decode", "prefill", "gather", "copy", "score", "summarise"}
    assert_compiles(device)


@needs_both
@pytest.mark.slow
@pytest.mark.parametrize(("dim", "formats"), cases([512], (512, ["fp16"])))
def test_kernels_of_latents_compile(
    dim: int, formats: list[FormatName], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables_module, "LEAST_SAVED", 1)
    device, geometry = Device(modes=()), LayerGeometry(1, dim, mx.bfloat16, 1, 64, mx.bfloat16)
    backend = backend_on(device, "cuda")
    for batch, heads in (
        (written(backend, geometry, formats, [300]), 128),
        (sharing(backend, geometry, formats, [(0, 1), (0, 2)], [300, 300]), 16),
    ):
        rows = len(batch.metadata.context_lens)
        asked, positions = (mx.zeros((rows, heads, 1, each), mx.bfloat16) for each in (dim, 64))
        batch.pages.attend(asked, batch.metadata, Attention(1.0), None, positions)
    assert any("groups_of_latents" in name for name in device.texts)
    assert_compiles(device)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "flags"),
    [
        ("write", []),
        ("decode", ["HAS_Q4", "HAS_Q5", "HAS_CODES", "PARTIAL"]),
        ("decode", ["HAS_FLOATS", "WHOLE", "STEP"]),
        ("merge", []),
        ("prefill", ["HAS_FLOATS", "WHOLE"]),
    ],
)
def test_the_text_of_the_bench_compiles(operation: str, flags: list[str]) -> None:
    constants = {"K_DIM": 128, "V_DIM": 128, "ROWS": 4, "BLOCKS": 1, "PARTS": 8}
    constants |= {"THREADS": 128, "SHARERS": 1, "AHEAD": 16}
    code, log = compiled(kernel_text(operation, flags, **constants), "sm_90")
    assert code, log
