"""A GPU's kernels are checked before their first use: one that is wrong writes no token."""

from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.verdicts import RIGHT, Verdicts
from tests.support.generation import Run, assert_same_run, greedy
from tests.support.gpu_on_cpu.emulated import EmulatedKernel
from tests.support.gpu_on_cpu.launch import Buffer
from tests.support.gpu_pages import backend_on, device_of, needs_compiler, rarely
from tests.support.zoo import small_model

pytestmark = [needs_compiler, pytest.mark.slow]

# Of a model with random weights: kernels sum in another order than plain operations.
TOLERANCE = 0.25
OPERATIONS = ("write", "gather", "prefill", "decode", "merge", "copy")
FAULTS = ("writes nothing", "writes elsewhere", "writes no numbers", "is refused")


def spoil(fault: str, buffer: Buffer, before: Any) -> None:
    """Change what a kernel has written."""
    if fault == "writes nothing":
        buffer.contents[:] = before
    elif fault == "writes elsewhere":
        buffer.contents[:] = np.roll(buffer.contents, 2)
    else:
        buffer.contents[buffer.contents != before] = 0xFF


def run_with(backend: Backend) -> Run:
    """A prompt that nearly fills a page, and tokens behind it, whose full page is quantised."""
    model: Any = small_model("llama", head_dim=64, num_hidden_layers=1)
    model.set_dtype(mx.float16)
    factory = PagedCacheFactory(model, max_bytes=64 << 20, page_format="q4", backend=backend)
    prompt = [(7 * i * i + 3 * i + 1) % 97 for i in range(252)]
    run = greedy(model, prompt, factory.make_cache(), 8, 128)
    factory.close()
    return run


def certified(tmp_path: Path) -> tuple[GpuBackend, Verdicts]:
    backend = backend_on(device_of("cuda", checked=False), "cuda")
    backend.verdicts = Verdicts(tmp_path / "kernels.json", "cuda")
    return backend, backend.verdicts


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        (operation, fault) if at % 5 == 0 else rarely(operation, fault)
        for at, (operation, fault) in enumerate(product(OPERATIONS, FAULTS))
    ],
)
def test_plain_operations_serve_in_the_place_of_a_faulty_kernel(
    operation: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, spoiled = EmulatedKernel._run, set()

    def faulty(kernel: EmulatedKernel, unit: Any, buffers: list[Buffer], *launch: Any) -> None:
        before = [buffer.contents.copy() for buffer in buffers]
        run(kernel, unit, buffers, *launch)
        if kernel.name.split("_")[2] == operation:
            spoiled.add(kernel.name)
            if fault == "is refused":
                raise RuntimeError("the compiler takes no such text")
            for buffer, contents in zip(buffers, before, strict=True):
                if (buffer.is_slab or buffer.is_output) and buffer.name != "done":
                    spoil(fault, buffer, contents)

    monkeypatch.setattr(EmulatedKernel, "_run", faulty)
    backend, verdicts = certified(tmp_path)
    assert_same_run(run_with(backend), run_with(Backend()), TOLERANCE)
    assert len(spoiled) == 1  # in its check, and never again
    (wrong,) = spoiled
    assert verdicts.failure is not None
    assert verdicts.found[wrong] != RIGHT
    assert backend.fallbacks > 0


def test_sound_kernels_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, verdicts = certified(tmp_path)
    run = run_with(backend)
    assert_same_run(run, run_with(Backend()), TOLERANCE)
    assert backend.fallbacks == 0
    assert {name.split("_")[2] for name in verdicts.found} == set(OPERATIONS)
    assert set(verdicts.found.values()) == {RIGHT}
    monkeypatch.setattr(GpuBackend, "_failure", lambda *_: pytest.fail("checked again"))
    again, _ = certified(tmp_path)
    assert run_with(again).tokens == run.tokens
