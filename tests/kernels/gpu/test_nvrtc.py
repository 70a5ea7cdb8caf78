"""NVIDIA's own compiler accepts the CUDA text, where its wheels are installed."""

from dataclasses import replace

import mlx.core as mx
import pytest

from benches.cuda_texts import kernel_text
from paged_kv.kernels.pages import prefix_groups
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.page_format import FormatName
from tests.support.gpu_on_cpu.emulated import Device
from tests.support.gpu_on_cpu.nvrtc import compiled, local_bytes, why_not
from tests.support.gpu_on_cpu.toolchain import why_not as why_not_on_cpu
from tests.support.gpu_pages import backend_on, same, sharing, written

REASON = why_not() or why_not_on_cpu()
# The addresses that a kernel chooses among: of 16 slabs, layouts, tables and parameters. A thread
# keeps no other array in memory, as it would an array that a loop which is not unrolled indexes.
OF_SLABS = (16 + 3) * 8


each_format = pytest.mark.parametrize("formats", [["fp16"], ["q8"], ["q4"], ["fp16", "q4"]])


def assert_compiles(device: Device) -> None:
    """All of its texts, with all sums in registers."""
    for name, text in device.texts.items():
        size, log = compiled(text, "sm_80")
        assert size, f"{name}: {log}"
        assert local_bytes(log) <= OF_SLABS, f"{name}: {log}"


@pytest.mark.skipif(bool(REASON), reason=REASON or "there is one")
@pytest.mark.slow
@pytest.mark.parametrize("dim", [128, 512])
@each_format
def test_kernels_of_heads_compile(
    dim: int, formats: list[FormatName], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16. The bench's texts, below, are in float16."""
    dtype = mx.bfloat16
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 1)
    device = Device(modes=())  # The test makes texts, and runs no kernel.
    backend = backend_on(device, "cuda")
    batch = written(backend, same(dim, dtype, heads=1), formats, [300], more=True)
    step = (mx.zeros((1, 1, 1, dim), dtype),) * 2
    attention = Attention(1.0)
    for sinks in (None, mx.zeros((8,))):
        for queries in (1, 2):
            asked = mx.zeros((1, 8, queries, dim), dtype)
            batch.pages.attend(asked, batch.metadata, Attention(1.0, sinks=sinks))
        asked = mx.zeros((1, 8, 1, dim), dtype)
        backend.write_and_attend(
            batch.pages, step, asked, batch.metadata, Attention(1.0, sinks=sinks)
        )
    batch.pages.attend(asked, batch.metadata, attention, unwritten=step)
    behind = sharing(backend, same(dim, dtype, heads=1), formats, [(0, 1), (0, 2)], [300, 300])
    for queries in (1, 2):
        asked = mx.zeros((2, 8, queries, dim), dtype)
        behind.pages.attend(asked, behind.metadata, attention)
    assert any("in_groups" in name for name in device.texts)
    batch.pages.gather(batch.metadata)
    batch.pages.gather(batch.metadata, step)
    batch.pages.write(*step, batch.metadata)
    batch.pages.copy({0: 1})
    operations = {name.split("_")[4] for name in device.texts}
    assert operations >= {"write", "decode", "prefill", "gather", "copy"}
    assert_compiles(device)


@pytest.mark.skipif(bool(REASON), reason=REASON or "there is one")
@pytest.mark.slow
@pytest.mark.parametrize("dim", [96, 256, 512])
@each_format
def test_kernels_that_choose_compile(dim: int, formats: list[FormatName]) -> None:
    dtype = mx.bfloat16
    device = Device(modes=())
    geometry = replace(same(dim, dtype, heads=1), has_summaries=True)
    batch = written(backend_on(device, "cuda"), geometry, formats, [1300], more=True)
    step, asked = (mx.zeros((1, 1, 1, dim), dtype),) * 2, mx.zeros((1, 8, 1, dim), dtype)
    for read_tokens in (768, 1024):
        attention = Attention(1.0, sinks=mx.zeros((8,)), read_tokens=read_tokens)
        batch.pages.attend(asked, batch.metadata, attention)
        batch.pages.write_later(*step, batch.metadata)
        batch.pages.attend(asked, batch.metadata, attention)
    ends_a_page = AttentionMetadata(batch.metadata.block_tables, (1280,), (0,))
    if formats == ["fp16"]:
        batch.pages.write(*step, ends_a_page)
    batch.pages.copy({0: 1})
    operations = {name.split("_")[4] for name in device.texts}
    assert operations >= {"score", "decode", "copy"}
    assert ("summarise" in operations) == (formats == ["fp16"])
    assert_compiles(device)


@pytest.mark.skipif(bool(REASON), reason=REASON or "there is one")
@pytest.mark.slow
@each_format
def test_kernels_of_latents_compile(
    formats: list[FormatName], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = mx.bfloat16
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 1)
    device = Device(modes=())
    backend = backend_on(device, "cuda")
    latents = written(backend, LayerGeometry(1, 512, dtype, 1, 64, dtype), formats, [300])
    asked, positions = (mx.zeros((1, 128, 1, each), dtype) for each in (512, 64))
    latents.pages.attend_latent(asked, positions, latents.metadata, Attention(1.0))
    behind = sharing(backend, latents.pages.geometry, formats, [(0, 1), (0, 2)], [300, 300])
    asked, positions = (mx.zeros((2, 16, 1, each), dtype) for each in (512, 64))
    behind.pages.attend_latent(asked, positions, behind.metadata, Attention(1.0))
    assert any("groups_of_latents" in name for name in device.texts)
    assert_compiles(device)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")
@pytest.mark.parametrize(
    ("operation", "flags"),
    [
        ("write", []),
        ("decode", ["HAS_Q4", "HAS_CODES", "PARTIAL"]),
        ("decode", ["HAS_FLOATS", "WHOLE", "STEP"]),
        ("merge", ["HAS_CODES"]),
        ("prefill", ["HAS_FLOATS", "WHOLE"]),
    ],
)
def test_the_text_of_the_bench_compiles(operation: str, flags: list[str]) -> None:
    constants = {"K_DIM": 128, "V_DIM": 128, "ROWS": 4, "BLOCKS": 1, "PARTS": 8}
    constants |= {"THREADS": 128, "SHARERS": 1}
    size, log = compiled(kernel_text(operation, flags, **constants), "sm_90")
    assert size, log
