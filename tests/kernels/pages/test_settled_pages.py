"""Pages do not wait for steps that were undone because MLX had no memory for them."""

from threading import get_ident
from unittest.mock import Mock

import mlx.core as mx
import pytest

from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.gpu.order import Chain
from paged_kv.kernels.pages.errors import ThreadConflict
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_pages import LayerPages
from tests.support.attention_metadata import unpadded
from tests.support.failing_allocator import ALL, failing_allocations

LARGE = 1 << 20


@pytest.fixture
def pages() -> LayerPages:
    """Pages whose latest kernel takes a large array that is not computed."""
    backend = GpuBackend("metal", Mock())
    pages = LayerPages(LayerGeometry(2, 64, mx.float16, 2, 64, mx.float16), backend, 64)
    pages.kept = Chain(mx.ones(LARGE)[:8].astype(mx.int32), get_ident())
    read = mx.ones(LARGE)[:8]
    pages.lazy_reads.watch([read], unpadded(((0,),), (20,)))
    pages.memo["held"] = read
    return pages


def test_what_there_is_no_memory_for_is_forgotten(pages: LayerPages) -> None:
    with failing_allocations(0, ALL, LARGE):
        pages.settle()
        mx.eval(pages.kept.latest)
        pages.settle()
    assert not pages.lazy_reads.noted


def test_what_there_is_memory_for_is_computed(pages: LayerPages) -> None:
    latest = pages.kept.latest
    pages.settle()
    assert pages.kept.latest is latest
    with failing_allocations(0, ALL, LARGE):
        assert pages.kept.latest.tolist() == [1] * 8
        assert pages.memo["held"].tolist() == [1] * 8


def test_another_threads_work_is_left_to_it(
    pages: LayerPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = pages.kept.latest
    monkeypatch.setattr(pages.backend, "synchronize", Mock(side_effect=ThreadConflict))
    with pytest.raises(ThreadConflict):
        pages.settle()
    assert pages.kept.latest is latest
