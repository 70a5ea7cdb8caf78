"""The memory of layers: growth to 16K tokens maps few pages at a time, and copies few; new slabs
hold zeros, also where their memory was used before; pages do not wait for steps that were undone
because MLX had no memory for them."""

from dataclasses import dataclass, field
from threading import get_ident
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from paged_kv import PagePool
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.gpu.kernels import Chain
from paged_kv.kernels.pages.layer_memory import MAX_SLABS
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.memory import untouched
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import LayerGeometry
from tests.support.attention_metadata import unpadded
from tests.support.failing_allocator import ALL, failing_allocations
from tests.support.layer_caches import caches_of

HEADS, DIM, TOKENS, STEP = 2, 64, 16_384, 2_048
TOKEN_BYTES = 2 * HEADS * DIM * 2  # Keys and values of one layer, in float16.


@dataclass
class WatchedGrowth:
    """Appends to every layer of one sequence, and verifies each step.

    Attributes:
        transient: the most bytes that a step may take beside what it maps.
    """

    pool: PagePool
    transient: int
    slabs: dict[tuple[int, int], int] = field(default_factory=dict)
    growths: int = 0
    copied: int = 0

    def __post_init__(self) -> None:
        self.query = mx.zeros((1, HEADS, 1, DIM), dtype=mx.float16)
        self.page_bytes = 256 * TOKEN_BYTES * self.pool.num_layers
        self.caches = caches_of(self.pool)

    def append(self, keys: mx.array, values: mx.array) -> None:
        mapped = self.pool.stats().bytes_mapped
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        for cache in self.caches:
            written, _ = cache.update_and_fetch(keys, values)
            # Evaluate at once, as a model does: dropped arrays might still be computed later.
            written.read.attend(self.query, "causal", scale=1.0)
        found, before = self.sizes(), self.slabs
        stats = self.pool.stats()
        grown = stats.bytes_mapped - mapped
        copied = sum(before[slab] for slab in before.keys() - found.keys())
        # Pages move layer by layer.
        twice = copied // self.pool.num_layers
        assert mx.get_peak_memory() - active <= grown + twice + self.transient
        assert copied <= max(mapped // 16, 8 * self.page_bytes)
        assert stats.bytes_mapped <= stats.bytes_budget
        assert stats.cow_copies == 0
        assert grown == 0 or found != before
        assert len(self.pool.groups[0].allocator.slabs) <= MAX_SLABS
        self.slabs = found
        self.growths += grown > 0
        self.copied += copied

    def sizes(self) -> dict[tuple[int, int], int]:
        """The bytes of each layer's slabs, by their addresses, after their writes."""
        return {
            (layer, np.asarray(slab.memory).ctypes.data): slab.memory.nbytes
            for layer, pages in self.pool.groups[0].pages.items()
            for slab in pages.slabs.values()
        }

    def assert_no_slab_is_over_an_eighth_of_the_budget(self) -> None:
        layers = self.pool.groups[0].pages.values()
        for slab in self.pool.groups[0].allocator.slabs:
            slab_bytes = sum(pages.slabs[slab].memory.nbytes for pages in layers)
            assert slab_bytes <= self.pool.budget.max_bytes // 8


@pytest.mark.parametrize(
    ("step", "budget_in_tokens"), [(64, 2 * TOKENS), (STEP, 2 * TOKENS), (STEP, 8 * TOKENS)]
)
@pytest.mark.slow
def test_growth_to_16k_tokens_copies_little(step: int, budget_in_tokens: int) -> None:
    """Prefill copies nothing, and decode less than it writes. A step may hold its tokens three
    times: in the step, in page order and in the graph."""
    layers = 1 if step == 64 else 2
    pool = PagePool(layers, max_bytes=budget_in_tokens * layers * TOKEN_BYTES)
    growth = WatchedGrowth(pool, transient=3 * layers * step * TOKEN_BYTES)
    keys = mx.random.normal((1, HEADS, TOKENS, DIM), key=mx.random.key(0)).astype(mx.float16)
    values = keys + 1
    mx.eval(keys, values)
    for at in range(0, TOKENS, step):
        growth.append(keys[:, :, at : at + step], values[:, :, at : at + step])
    # Up to 128 pages a 64th is no page more.
    assert growth.growths == TOKENS // max(step, 256)
    assert (growth.copied > 0) == (step == 64)
    assert growth.copied < TOKENS * TOKEN_BYTES
    growth.assert_no_slab_is_over_an_eighth_of_the_budget()
    for cache in growth.caches:
        assert mx.array_equal(cache.keys, keys)
        assert mx.array_equal(cache.values, values)
    pool.check()


@pytest.mark.parametrize("words", [64, 5000, (1 << 22) + 64])
def test_memory_that_was_used_is_cleared(words: int) -> None:
    used = [np.full(words, 7, np.uint16) for _ in range(4)]
    given = [untouched((words // 8, 8)) for _ in range(2)]
    del used, given
    memory = untouched((words // 8, 8))
    assert (memory.dtype, memory.shape) == (WORD, (words // 8, 8))
    assert not mx.any(memory)


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
