"""Growth to 16K tokens maps few pages at a time, and copies few."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.kernels.pages.layer_memory import MAX_SLABS

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
        sequence = Sequence(self.pool)
        layers = range(self.pool.num_layers)
        self.page_bytes = 256 * TOKEN_BYTES * self.pool.num_layers
        self.caches = [PagedKVCache(self.pool, layer, [sequence]) for layer in layers]

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


def random_tokens(count: int) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((1, HEADS, count, DIM), key=mx.random.key(0)).astype(mx.float16)
    values = keys + 1
    mx.eval(keys, values)
    return keys, values


@pytest.mark.slow
def test_decode_to_16k_tokens_copies_less_than_it_writes() -> None:
    pool = PagePool(1, max_bytes=2 * TOKENS * TOKEN_BYTES)
    growth = WatchedGrowth(pool, transient=32 * TOKEN_BYTES)
    keys, values = random_tokens(TOKENS)
    for at in range(TOKENS):
        growth.append(keys[:, :, at : at + 1], values[:, :, at : at + 1])
    # Up to 128 pages a 64th is no page more.
    assert growth.growths == TOKENS // 256
    assert 0 < growth.copied < TOKENS * TOKEN_BYTES
    growth.assert_no_slab_is_over_an_eighth_of_the_budget()
    assert mx.array_equal(growth.caches[0].keys, keys)
    assert mx.array_equal(growth.caches[0].values, values)
    pool.check()


@pytest.mark.parametrize("budget_in_tokens", [2 * TOKENS, 8 * TOKENS])
def test_prefill_of_16k_tokens_copies_nothing(budget_in_tokens: int) -> None:
    """A step may hold its tokens three times: in the step, in page order and in the graph."""
    layers = 2
    pool = PagePool(layers, max_bytes=budget_in_tokens * layers * TOKEN_BYTES)
    growth = WatchedGrowth(pool, transient=3 * layers * STEP * TOKEN_BYTES)
    keys, values = random_tokens(TOKENS)
    for at in range(0, TOKENS, STEP):
        growth.append(keys[:, :, at : at + STEP], values[:, :, at : at + STEP])
        stats = pool.stats()
        assert stats.bytes_mapped == stats.bytes_active
    assert (growth.growths, growth.copied) == (TOKENS // STEP, 0)
    growth.assert_no_slab_is_over_an_eighth_of_the_budget()
    for cache in growth.caches:
        assert mx.array_equal(cache.keys, keys)
        assert mx.array_equal(cache.values, values)
    pool.check()


def test_a_budget_that_the_tokens_fill_is_used_to_the_last_page() -> None:
    """Slabs of at most an eighth never leave a remainder that the budget could still hold."""
    pool = PagePool(1, max_bytes=TOKENS * TOKEN_BYTES)
    growth = WatchedGrowth(pool, transient=3 * STEP * TOKEN_BYTES)
    keys, values = random_tokens(TOKENS)
    for at in range(0, TOKENS, STEP):
        growth.append(keys[:, :, at : at + STEP], values[:, :, at : at + STEP])
    stats = pool.stats()
    assert stats.bytes_mapped == stats.bytes_active == stats.bytes_budget
    growth.assert_no_slab_is_over_an_eighth_of_the_budget()
