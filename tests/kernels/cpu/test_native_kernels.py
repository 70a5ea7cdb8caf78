"""Features of only the native kernels: unwritten keys, any strides, threads, forks."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.cpu.native_backend import ALIGNMENT, NativeBackend
from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import FP16, LayerGeometry
from tests.support.arrays import normal, numbers
from tests.support.attention_metadata import unpadded
from tests.support.backends import instruction_sets, native_library
from tests.support.dense_attention import dense_attention
from tests.support.patience import wait_until

ENTRIES = [0, 1, 2, 3, 4, 5, 64, 65, 66, 67, 68, 69]
TOLERANCES = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


@pytest.fixture(params=instruction_sets())
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    library = native_library()
    library.use_instruction_set(request.param)
    return NativeBackend(library)


def new_pages(backend: NativeBackend, geometry: LayerGeometry) -> LayerPages:
    """Two slabs full of NaN."""
    pages = LayerPages(geometry, backend, 64)
    pages.map_slab(0, 6, FP16)
    pages.map_slab(1, 6, FP16)
    pages.load(dict.fromkeys(ENTRIES, mx.full(pages.page(0).shape, 0xFFFF, dtype=WORD)))
    return pages


def tables_for(lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    free = [int(entry) for entry in np.random.default_rng(7).permutation(ENTRIES)]
    return tuple(tuple(free.pop() for _ in range(-(-length // 256))) for length in lengths)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_queries_of_another_dtype_than_the_pages(backend: NativeBackend, dtype: mx.Dtype) -> None:
    pages = new_pages(backend, LayerGeometry(2, 64, mx.bfloat16, 2, 64, mx.float16))
    metadata = unpadded(((4, 69),), (300,))
    keys, values = normal((1, 2, 300, 64), mx.bfloat16, 1), normal((1, 2, 300, 64), mx.float16, 2)
    pages.write(keys, values, metadata)
    asked = normal((1, 6, 5, 64), dtype, 3)
    found = pages.attend(asked, metadata, Attention(0.125))
    assert found.dtype == dtype
    expected = dense_attention(
        *(numbers(array[0]) for array in (asked, keys, values)),
        scale=0.125,
        causal=True,
        window=None,
        sinks=None,
    )
    assert np.abs(numbers(found[0]) - expected).max() <= TOLERANCES[dtype]


def test_arrays_with_any_strides(backend: NativeBackend) -> None:
    """Transposed, reversed, repeated and every second number."""
    geometry = LayerGeometry(2, 32, mx.float32, 2, 32, mx.float32)
    pages, others = new_pages(backend, geometry), new_pages(backend, geometry)
    metadata = unpadded(((0, 1),), (300,))
    wide = normal((1, 300, 2, 64), mx.float32, 1)
    keys = wide.transpose(0, 2, 1, 3)[..., ::2]
    values = mx.broadcast_to(normal((1, 1, 300, 32), mx.float32, 2), (1, 2, 300, 32))[:, :, ::-1]
    queries = normal((1, 32, 3, 4), mx.float32, 3).transpose(0, 3, 2, 1)
    pages.write(keys, values, metadata)
    others.write(mx.contiguous(keys), mx.contiguous(values), metadata)
    for entry in (0, 1):
        assert mx.array_equal(pages.page(entry), others.page(entry))
    found = pages.attend(queries, metadata, Attention(0.2))
    assert mx.array_equal(found, pages.attend(mx.contiguous(queries), metadata, Attention(0.2)))


def test_pages_begin_at_a_cache_line_and_slabs_fit_the_machine() -> None:
    backend = NativeBackend(native_library())
    for pages_count in (1, 3):
        slab = backend.new_slab(pages_count, 512, 40)
        assert slab.shape == (pages_count * 512, 40)
        assert np.asarray(slab).ctypes.data % ALIGNMENT == 0
    with pytest.raises(MemoryError, match="smaller max_bytes"):
        backend.new_slab(1 << 16, 1 << 20, 1 << 10)


def test_arrays_that_do_not_fit_the_pages_are_refused(backend: NativeBackend) -> None:
    pages = new_pages(backend, LayerGeometry(2, 32, mx.float32, 2, 32, mx.float32))
    metadata = unpadded(((0,),), (5,))
    good = mx.zeros((1, 2, 5, 32))
    for bad in (good[:, :1], good[..., :16], good.astype(mx.float16), good.astype(mx.int32)):
        with pytest.raises(ValueError, match="shapes or dtypes"):
            pages.write(bad, good, metadata)
    for query in (mx.zeros((1, 3, 1, 32)), mx.zeros((2, 2, 1, 32)), mx.zeros((1, 2, 1, 24))):
        with pytest.raises(ValueError, match="shapes or dtypes"):
            pages.attend(query, metadata, Attention(1.0))


def test_what_is_supported() -> None:
    def supports(*parts: Any) -> bool:
        return NativeBackend(native_library()).supports(LayerGeometry(*parts))

    half = mx.float16
    assert supports(2, 576, half, 2, 512, mx.bfloat16)
    assert supports(2, 8, mx.float32, 2, 8, mx.float32)
    assert not supports(2, 64, half, 1, 64, half)
    assert not supports(2, 60, half, 2, 64, half)
    assert not supports(2, 584, half, 2, 64, half)
    assert not supports(1, 576, half, 1, 0, half)


def test_the_number_of_threads_does_not_matter(backend: NativeBackend) -> None:
    pages = new_pages(backend, LayerGeometry(4, 128, mx.float16, 4, 128, mx.float16))
    metadata = unpadded(tables_for((1500, 700)), (1500, 700))
    step = normal((2, 4, 1500, 128), mx.float16, 1)
    asked = normal((2, 16, 40, 128), mx.float16, 2)
    backend.library.use_threads(1)
    pages.write(step, step, metadata)
    alone = (
        pages.attend(asked, metadata, Attention(0.1)),
        pages.attend(asked[:, :, :1], metadata, Attention(0.1)),
    )
    for threads in (2, 5):
        backend.library.use_threads(threads)
        pages.write(step, step, metadata)
        for expected, count in zip(alone, (40, 1), strict=True):
            found = pages.attend(asked[:, :, :count], metadata, Attention(0.1))
            assert mx.allclose(found, expected, atol=2e-3)
    backend.library.use_threads(2)


def test_threads_of_python_may_call_at_once() -> None:
    """One of them uses the library's threads, the others compute alone."""
    geometry = LayerGeometry(4, 128, mx.float16, 4, 128, mx.float16)
    metadata = unpadded(((3, 68, 1, 64, 5),), (1200,))

    def work(seed: int) -> bool:
        mx.set_default_device(mx.cpu)
        backend = NativeBackend(native_library())
        pages = new_pages(backend, geometry)
        step = normal((1, 4, 1200, 128), mx.float16, seed)
        asked = normal((1, 16, 1, 128), mx.float16, seed + 100)
        pages.write(step, step, metadata)
        first = pages.attend(asked, metadata, Attention(0.1))
        return all(
            bool(mx.allclose(pages.attend(asked, metadata, Attention(0.1)), first, atol=1e-3))
            for _ in range(10)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(8)))


FORKED = """
import os, sys
import mlx.core as mx
from paged_kv.kernels.cpu.native_backend import NativeBackend
import tests.kernels.cpu.test_native_kernels as kernels
backend = NativeBackend(kernels.native_library())
backend.library.use_threads(3)
pages = kernels.new_pages(backend, kernels.LayerGeometry(4, 128, mx.float16, 4, 128, mx.float16))
metadata = kernels.unpadded(((3, 68, 1, 64, 5),), (1200,))
step = mx.ones((1, 4, 1200, 128), dtype=mx.float16)
asked = mx.ones((1, 16, 1, 128), dtype=mx.float16)
mx.eval(step, asked)
pages.write(step, step, metadata)
pages.attend(asked, metadata, kernels.Attention(0.1))
child = os.fork()
# MLX's own threads are gone in the child: nothing here may need them.
output = kernels.gives_ones(backend, pages, asked, metadata)
if child == 0:
    os._exit(0 if output else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output)
"""


def gives_ones(
    backend: NativeBackend, pages: LayerPages, asked: mx.array, metadata: AttentionMetadata
) -> bool:
    """Whether attention to values that are all ones gives ones."""
    output = backend.attend(pages, asked, metadata, Attention(0.1))
    return bool((np.asarray(output) == 1).all())


def test_a_forked_child_has_threads_of_its_own() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stdout.split() == ["0", "True"], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what each thread does")
def test_nothing_spins_between_calls(backend: NativeBackend) -> None:
    pages = new_pages(backend, LayerGeometry(4, 128, mx.float16, 4, 128, mx.float16))
    metadata = unpadded(((3, 68, 1, 64, 5),), (1200,))
    step = mx.ones((1, 4, 1200, 128), dtype=mx.float16)
    pages.write(step, step, metadata)
    backend.library.use_threads(2)
    pages.attend(step[:, :, :1], metadata, Attention(0.1))
    others = set(THREADS.iterdir())
    backend.library.use_threads(4)
    pages.attend(step[:, :, :1], metadata, Attention(0.1))
    started = set(THREADS.iterdir()) - others
    assert len(started) == 3
    wait_until(lambda: all(is_asleep(thread) for thread in started))
    ran = [nanoseconds(thread) for thread in started]
    time.sleep(0.3)
    assert [nanoseconds(thread) for thread in started] == ran
    backend.library.use_threads(2)


THREADS = Path("/proc/self/task")


def is_asleep(thread: Path) -> bool:
    # The name before the state may contain blanks and brackets.
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "S"


def nanoseconds(thread: Path) -> int:
    """How long a thread has run on a processor."""
    return int((thread / "schedstat").read_text().split()[0])
