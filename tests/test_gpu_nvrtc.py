"""The CUDA text goes through NVIDIA's own compiler, where its wheels are installed."""

import mlx.core as mx
import pytest

from benches.cuda_texts import kernel_text
from tests.gpu_on_cpu.emulated import Device
from tests.gpu_on_cpu.nvrtc import compiled, why_not
from tests.gpu_on_cpu.toolchain import why_not as why_not_on_cpu
from tests.gpu_pages import backend_on, same, written

REASON = why_not() or why_not_on_cpu()


@pytest.mark.skipif(bool(REASON), reason=REASON or "there is one")
@pytest.mark.slow
def test_all_kernels_compile() -> None:
    """In bfloat16; the bench's, below, are in float16."""
    dim, dtype, formats = 128, mx.bfloat16, ["fp16", "q4"]
    device = Device(modes=())  # texts are made, and do not run
    batch = written(backend_on(device, "cuda"), same(dim, dtype, heads=1), formats, [40])
    for queries in (1, 2):
        asked = mx.zeros((1, 8, queries, dim), dtype)
        batch.pages.attend(asked, batch.rows, scale=1.0)
    batch.pages.gather(batch.rows)
    batch.pages.copy({0: 1})
    operations = {"write", "decode", "merge", "prefill", "gather", "copy"}
    assert len(device.texts) == len(operations)
    for name, text in device.texts.items():
        size, log = compiled(text, "sm_80")
        assert size, f"{name}: {log}"


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")
@pytest.mark.parametrize("operation", ["write", "decode", "merge", "prefill"])
def test_the_text_of_the_bench_compiles(operation: str) -> None:
    constants = {"K_DIM": 128, "V_DIM": 128, "ROWS": 4, "BLOCKS": 1, "PARTS": 4, "FORMATS": 4}
    size, log = compiled(kernel_text(operation, **constants), "sm_90")
    assert size, log
