"""page_format="auto": the oldest pages are requantised when memory is short; limits hold."""

import copy
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted, Sequence
from paged_kv.allocator.requantisation import FullBlock, OldestFirst, Requantisation
from paged_kv.cache.saved_state import page_formats
from tests.support.zoo import small_model

HEAD = 32
LAYERS = 2
BLOCK_BYTES = LAYERS * 2 * 256 * HEAD * 2
TOKENS = [(7 * i * i + 3 * i + 1) % 97 for i in range(12 * 256)]


def new_pool(blocks: int, page_format: Any = "auto") -> PagePool:
    return PagePool(LAYERS, page_format=page_format, max_bytes=blocks * BLOCK_BYTES)


def caches_of(pool: PagePool) -> list[PagedKVCache]:
    sequence = Sequence(pool)
    return [PagedKVCache(pool, layer, [sequence]) for layer in range(LAYERS)]


def write(caches: list[PagedKVCache], tokens: int) -> None:
    for cache in caches:
        numbers = mx.random.normal((2, 1, 1, tokens, HEAD)).astype(mx.float16)
        cache.update_and_fetch(numbers[0], numbers[1])


def fill(pool: PagePool, held: list[list[PagedKVCache]]) -> None:
    """Write a page for each sequence in turn, until the pool is exhausted."""
    for _ in range(200):
        for caches in held:
            try:
                write(caches, 256)
            except PoolExhausted:
                return
            assert_within_budget(pool)
    raise AssertionError("the pool was never exhausted")


def formats(caches: list[PagedKVCache]) -> list[str]:
    return page_formats(caches[0].pool, 0, caches[0].sequences[0])


def assert_within_budget(pool: PagePool) -> None:
    """This also holds for the memory itself."""
    pool.check()
    held = sum(
        slab.memory.nbytes
        for group in pool.groups
        for pages in group.pages.values()
        for slab in pages.slabs.values()
    )
    assert held == pool.stats().bytes_mapped == pool.budget.mapped <= pool.budget.max_bytes


def test_the_first_page_and_the_latest_stay_until_the_budget_is_full() -> None:
    pool = new_pool(9)
    caches = caches_of(pool)
    while pool.stats().requantisations.get("q4", 0) < 3:
        write(caches, 256)
        assert_within_budget(pool)
        names = formats(caches)
        assert names[0] == "fp16"
        assert set(names[-4:]) == {"fp16"}
        # The oldest pages are the smallest.
        assert names[1:] == sorted(names[1:], key=["q4", "q8", "fp16"].index)
    fill(pool, [caches])
    names = formats(caches)
    assert names[0] != "fp16"
    assert len(names) > 18
    assert {cache.offset for cache in caches} == {256 * len(names)}


def test_below_the_watermark_nothing_is_requantised() -> None:
    pool = new_pool(16, OldestFirst(watermark=1.0))
    caches = caches_of(pool)
    write(caches, 16 * 256)
    assert formats(caches) == ["fp16"] * 16
    assert pool.stats().requantisations == {}
    half = new_pool(16, OldestFirst(watermark=0.5, recent=1))
    caches = caches_of(half)
    for _ in range(16):
        write(caches, 256)
    assert half.budget.mapped <= 0.5 * half.budget.max_bytes
    assert formats(caches)[-1] == formats(caches)[0] == "fp16"


def test_shared_blocks_become_smaller_for_all_who_hold_them() -> None:
    pool = new_pool(12)
    caches = caches_of(pool)
    write(caches, 6 * 256)
    fork = copy.deepcopy(caches)
    assert pool.stats().blocks_shared == 6
    while not pool.stats().requantisations.get("q8"):
        write(caches, 256)
    assert pool.stats().blocks_shared == 6
    assert "q8" in formats(fork)
    assert formats(fork) == formats(caches)[:6]
    for layer in range(LAYERS):
        ours, theirs = (c[layer].keys_and_values()[0][:, :, : 6 * 256] for c in (caches, fork))
        assert mx.array_equal(ours, theirs)
    assert_within_budget(pool)


@dataclass
class ToQ4:
    """A policy that lets these blocks become q4, and says how often it was asked."""

    chosen: Callable[[list[FullBlock]], list[FullBlock]]
    watermark: float = 0.5
    page_formats: tuple[str, ...] = ("q4",)
    asked: int = 0

    def requantisations(self, blocks: list[FullBlock], pressure: float) -> list[Requantisation]:
        self.asked += 1
        return [Requantisation(block.block, "q4") for block in self.chosen(blocks)]


def latest_first(blocks: list[FullBlock]) -> list[FullBlock]:
    return sorted((each for each in blocks if each.page_format != "q4"), key=lambda each: each.age)


def test_a_policy_of_ones_own_is_obeyed() -> None:
    pool = new_pool(16, ToQ4(latest_first))
    caches = caches_of(pool)
    for _ in range(10):
        write(caches, 256)
    names = formats(caches)
    assert set(names) == {"fp16", "q4"}
    assert names.index("q4") > 0
    never = new_pool(8, ToQ4(lambda blocks: []))
    caches = caches_of(never)
    write(caches, 8 * 256)
    with pytest.raises(PoolExhausted):
        write(caches, 1)
    assert formats(caches) == ["fp16"] * 8
    assert {cache.offset for cache in caches} == {8 * 256}
    policy = ToQ4(lambda blocks: blocks)  # those that are q4 already too
    again = caches_of(new_pool(8, policy))
    for _ in range(12):
        write(again, 256)
    assert "q4" in formats(again)
    assert policy.asked < 50, "asked again and again"


def test_a_watermark_that_is_no_share_and_formats_that_there_are_not_are_refused() -> None:
    for watermark in (0, -0.5, 1.01, float("nan")):
        with pytest.raises(ValueError, match="watermark"):
            new_pool(4, OldestFirst(watermark=watermark))
    for name in ("q3", ("q4",) * 3, ("auto", "q4"), (), OldestFirst(page_formats=("q8", "q3"))):
        with pytest.raises(ValueError, match="is no page format"):
            new_pool(4, name)


def test_rings_are_left_alone() -> None:
    model: Any = small_model("gemma3_text")
    factory = PagedCacheFactory(model, page_format="auto", max_bytes=18 * BLOCK_BYTES)
    cache = factory.make_cache()
    for at in range(0, 12 * 256, 1024):
        model(mx.array([TOKENS[at : at + 1024]]), cache=cache)
        assert_within_budget(factory.pool)
    windowed = [layer.layer in factory.pool.windows for layer in cache]
    assert set(windowed) == {True, False}
    for layer, has_window in zip(cache, windowed, strict=True):
        names = page_formats(factory.pool, layer.layer, layer.sequences[0])
        assert (set(names) == {"fp16"}) == has_window


def test_what_is_admitted_can_be_read_page_by_page() -> None:
    pool = new_pool(12)
    held = [caches_of(pool) for _ in range(3)]
    for caches in held:
        for _ in range(2):
            write(caches, 256)
    most = bisect_right(range(96), 0, key=lambda pages: not pool.can_admit(256 * pages)) - 1
    assert most > 12 - 6
    new = caches_of(pool)
    for _ in range(most):
        write(new, 256)
        assert_within_budget(pool)
    assert pool.stats().allocation_failures == 0
