"""Rewrites of slabs under real sequences: contents, tokens and memory, faults and other threads."""

import gc
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedKVCache, PagePool
from paged_kv.allocator.slabs import IDLE_STEPS
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.kernels.cpu import native_backend
from paged_kv.kernels.pages import backend
from paged_kv.kernels.pages.layer_pages import LayerPages, NewSlab
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from tests.support.arrays import normal
from tests.support.layer_caches import caches_of

LAYERS, DIM = 2, 32
LAYER_PAGE = 2 * PAGE_SIZE * DIM * mx.float16.size
Caches = list[PagedKVCache]


@pytest.fixture
def filled_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """New slabs are filled. Otherwise one may get memory that was just freed, and the pages that
    it held."""
    for module in (native_backend, backend):
        monkeypatch.setattr(module, "untouched", lambda shape: mx.full(shape, 7, WORD))


def write(caches: Caches, count: int, seed: int) -> None:
    """A step of a model, whose attention reads pages."""
    for layer, cache in enumerate(caches):
        given = normal((1, 1, count, DIM), mx.float16, 10 * seed + layer)
        keys, values = cache.update_and_fetch(given, -given)
        mx.eval(paged_attention(given[:, :, -1:], keys, values, cache, 0.2, None))


def contents(caches: Caches) -> list[Any]:
    return [[each.tolist() for each in cache.keys_and_values()] for cache in caches]


def scattered(pool: PagePool) -> tuple[list[Caches], list[Any]]:
    """Sequences whose pages lie beside those of others that have ended, and their contents."""
    rows = [caches_of(pool) for _ in range(9)]
    for at in range(4):
        for seed, caches in enumerate(rows):
            write(caches, 200, 100 * at + seed)
    # Pages of all rows lie in each slab.
    kept = rows[::3]
    expected = [contents(caches) for caches in kept]
    return kept, expected


@pytest.mark.parametrize("page_format", ["fp16", "q4"])
@pytest.mark.usefixtures("backend")
@pytest.mark.slow
def test_what_sequences_hold_is_given_back_within_few_steps(page_format: str) -> None:
    pool = PagePool(LAYERS, max_bytes=64 << 20, page_format=page_format)
    kept, expected = scattered(pool)
    gc.collect()
    for seed in range(20):
        write(kept[0], 1, 1000 + seed)
    pool.check()
    for each in pool.groups[0].allocator.formats:
        assert len(each.free) <= max(1, each.num_used // 8)
    assert [contents(caches) for caches in kept[1:]] == expected[1:]
    del kept
    gc.collect()
    pool.clear()
    assert pool.stats().bytes_mapped == pool.budget.mapped == 0


def test_a_pool_settles_without_steps() -> None:
    pool = PagePool(LAYERS, max_bytes=64 << 20)
    kept, expected = scattered(pool)
    gc.collect()
    pool.release_unused()
    pool.check()
    (fp16,) = pool.groups[0].allocator.formats
    assert len(fp16.free) <= max(1, fp16.num_used // 8)
    assert [contents(caches) for caches in kept] == expected


@pytest.mark.parametrize("page_format", ["fp16", "q4"])
def test_a_short_sequence_holds_what_it_needs_and_nothing_when_it_has_ended(
    page_format: str,
) -> None:
    pool = PagePool(LAYERS, max_bytes=64 << 20, page_format=page_format)
    caches = caches_of(pool)
    # The second step fills a page, for which it takes another one until it ends.
    for count in (200, 190, *[1] * (IDLE_STEPS + 1)):
        write(caches, count, count)
    assert pool.budget.mapped == sum(cache.nbytes for cache in caches) > 0
    caches.clear()
    gc.collect()
    assert pool.stats().bytes_mapped == pool.budget.mapped == 0


def test_a_pool_without_steps_keeps_no_empty_slab() -> None:
    pool = PagePool(LAYERS, max_bytes=64 << 20)
    kept = caches_of(pool)
    write(kept, 200, 1)
    expected = contents(kept)
    ended = caches_of(pool)
    write(ended, 100, 2)
    del ended
    gc.collect()
    pool.stats()
    (fp16,) = pool.groups[0].allocator.formats
    assert fp16.spare == 1
    pool.release_unused()
    assert (fp16.spare, pool.budget.mapped) == (0, LAYERS * LAYER_PAGE)
    assert contents(kept) == expected


@pytest.mark.parametrize(("fails_at", "after"), [(0, "copy"), (1, "map"), (1, "copy")])
@pytest.mark.usefixtures("filled_slabs")
@pytest.mark.slow
def test_a_rewrite_that_fails_in_one_layer_changes_none(
    fails_at: int, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(LAYERS, max_bytes=64 << 20)
    kept, expected = scattered(pool)
    gc.collect()
    pool.stats()
    mapped, slabs = pool.budget.mapped, dict(pool.groups[0].allocator.slabs)
    layers = list(pool.groups[0].pages.values())
    whole = LayerPages.rewrite

    def failing(self: LayerPages, new: NewSlab, moves: Any, emptied: Any) -> None:
        if self is layers[fails_at]:
            if after == "copy":
                whole(self, new, moves, emptied)
            elif new.pages:
                self.map_slab(*new)
            raise MemoryError("planted")
        whole(self, new, moves, emptied)

    with monkeypatch.context() as patched:
        patched.setattr(LayerPages, "rewrite", failing)
        with pytest.raises(MemoryError, match="planted"):
            pool.compact()
    pool.check()
    assert (pool.budget.mapped, pool.groups[0].allocator.slabs) == (mapped, slabs)
    assert all(set(pages.slabs) == set(slabs) for pages in layers)
    assert [contents(caches) for caches in kept] == expected
    assert pool.compact().bytes_freed > 0
    assert [contents(caches) for caches in kept] == expected
