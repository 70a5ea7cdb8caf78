"""page_format="auto": the oldest pages are requantised when memory is short; limits hold."""

import copy
import gc
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted, Sequence
from paged_kv.allocator.requantisation import FullBlock, OldestFirst, Requantisation
from paged_kv.cache.saved_state import page_formats
from paged_kv.kernels.pages.page_format import page_format_named
from tests.support.followed_caches import FollowedCache, Held, farthest, followed_caches
from tests.support.generation import assert_nothing_is_used
from tests.support.grids import plain_cases
from tests.support.quantised_oracle import QuantisedOracle
from tests.support.zoo import small_model

HEAD = 32
LAYERS = 2
BLOCK_BYTES = LAYERS * 2 * 256 * HEAD * 2
QWEN_BLOCK_BYTES = 3 * 2 * 2 * 256 * HEAD * 4
TOKENS = [(7 * i * i + 3 * i + 1) % 97 for i in range(24 * 256)]


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


@pytest.mark.slow
def test_a_trained_model_goes_on_far_past_what_16_bits_allow(
    trained: Any, source_text: str
) -> None:
    model, tokenizer = trained("stdlib-llama")
    prompt = tokenizer.encode(source_text)[:6100]
    probe = PagedCacheFactory(model, max_bytes=1 << 30)
    probe.can_admit(1)
    block_bytes = probe.pool.groups[0].allocator.formats[0].block_bytes
    factory = PagedCacheFactory(model, page_format="auto", max_bytes=8 * block_bytes)
    cache = factory.make_cache()
    # Three times as many tokens as in 16 bits, but no more than the smallest pages hold.
    assert factory.can_admit(len(prompt))
    assert not factory.can_admit(10 * len(prompt))

    def progress(done: int, _: int) -> None:
        if done:
            assert_within_budget(factory.pool)

    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=10,
        prompt_cache=cache,
        prefill_step_size=512,
        prompt_progress_callback=progress,
    )
    tokens = []
    for token, logprobs in steps:
        tokens.append(int(token))
        assert bool(mx.isfinite(logprobs).all())
        assert_within_budget(factory.pool)
    assert len(tokens) == 10
    stats = factory.stats()
    assert stats.blocks_used >= 3 * 8
    assert stats.blocks_by_format["q4"] > 0
    assert (
        stats.requantisations["q8"] >= stats.requantisations["q4"] >= stats.blocks_by_format["q4"]
    )
    assert stats.gather_fallbacks == 0
    del steps, cache
    assert_nothing_is_used(factory)


def follow(oracle: QuantisedOracle, names: list[str]) -> None:
    """Requantise the oracle's pages as the pool's were: 16 bits become 8, and 8 become 4."""
    for page, name in enumerate(names):
        for before, after in (("fp16", "q8"), ("q8", "q4")):
            if name != before == oracle.format_of(page):
                oracle.hold(page, page_format_named(after))
        assert oracle.format_of(page) == name


class RequantisedCache(FollowedCache):
    """An oracle that requantises tokens where the pool requantised their pages."""

    def write(self, row: int, keys: mx.array, values: mx.array) -> Held:
        oracle = self.oracles[row]
        super().write(row, keys, values)
        follow(oracle, page_formats(self.paged.pool, self.paged.layer, self.paged.sequences[row]))
        held: Held = oracle.keys_and_values()
        return held


@pytest.mark.slow
def test_a_model_reads_what_a_requantised_oracle_holds() -> None:
    """Write until a sequence has pages of three formats at once."""
    model: Any = small_model("qwen3")
    factory = PagedCacheFactory(model, page_format="auto", max_bytes=9 * QWEN_BLOCK_BYTES)
    distances: list[mx.array] = []
    cache = followed_caches(model, factory, "fp16", distances, RequantisedCache)
    seen: set[str] = set()
    for at in range(0, 15 * 256, 500):
        mx.eval(model(mx.array([TOKENS[at : at + 500]]), cache=cache), distances)
        for layer in cache:
            (oracle,) = layer.oracles
            seen.update(map(oracle.format_of, range(-(-oracle.offset // 256))))
        assert_within_budget(factory.pool)
    assert farthest(distances) <= 1
    assert seen == {"fp16", "q8", "q4"}


def test_the_first_page_and_the_latest_stay_until_the_budget_is_full() -> None:
    pool = new_pool(12)
    caches = caches_of(pool)
    while pool.stats().requantisations.get("q4", 0) < 4:
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
    assert len(names) > 24
    assert {cache.offset for cache in caches} == {256 * len(names)}


@pytest.mark.parametrize(("blocks", "sequences"), [(5, 1), (16, 4), (16, 8), (64, 16)])
def test_sequences_that_are_all_first_and_latest_pages_get_smaller(
    blocks: int, sequences: int
) -> None:
    """The policy spares them until the budget is full, and then must requantise them."""
    pool = new_pool(blocks)
    held = [caches_of(pool) for _ in range(sequences)]
    fill(pool, held)
    assert pool.stats().blocks_used > 1.5 * blocks


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


def test_memory_comes_back_when_pages_are_smaller() -> None:
    pool = new_pool(32)
    first, second = caches_of(pool), caches_of(pool)
    for _ in range(44):
        write(first, 256)
    mapped = pool.budget.mapped
    assert mapped <= pool.budget.max_bytes < 44 * BLOCK_BYTES
    del first[:]
    gc.collect()
    pool.clear()
    assert_within_budget(pool)
    assert pool.budget.mapped == 0
    write(second, 10 * 256)
    assert formats(second) == ["fp16"] * 10


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


@dataclass(frozen=True)
class StraightToQ4:
    """A policy that requantises everything, the latest page first."""

    watermark: float = 0.5
    page_formats: tuple[str, ...] = ("q4",)

    def requantisations(self, blocks: list[FullBlock], pressure: float) -> Iterable[Requantisation]:
        by_age = sorted(blocks, key=lambda block: block.age)
        return [Requantisation(block.block, "q4") for block in by_age if block.page_format != "q4"]


@dataclass(frozen=True)
class Never(StraightToQ4):
    def requantisations(self, blocks: list[FullBlock], pressure: float) -> Iterable[Requantisation]:
        return []


class NamesAllAgain:
    """The policy skips pages that are q4 already."""

    watermark = 0.5
    page_formats = ("q4",)
    asked = 0

    def requantisations(self, blocks: list[FullBlock], pressure: float) -> Iterable[Requantisation]:
        self.asked += 1
        assert self.asked < 50, "asked again and again"
        return [Requantisation(block.block, "q4") for block in blocks]


def test_a_policy_of_ones_own_is_obeyed() -> None:
    pool = new_pool(16, StraightToQ4())
    caches = caches_of(pool)
    for _ in range(10):
        write(caches, 256)
    names = formats(caches)
    assert set(names) == {"fp16", "q4"}
    assert names.index("q4") > 0
    never = new_pool(8, Never())
    caches = caches_of(never)
    write(caches, 8 * 256)
    with pytest.raises(PoolExhausted):
        write(caches, 1)
    assert formats(caches) == ["fp16"] * 8
    assert {cache.offset for cache in caches} == {8 * 256}


def test_a_policy_that_names_what_is_small_already_ends() -> None:
    pool = new_pool(8, NamesAllAgain())
    caches = caches_of(pool)
    for _ in range(12):
        write(caches, 256)
    assert "q4" in formats(caches)


@pytest.mark.parametrize("watermark", [0, -0.5, 1.01, float("nan")])
def test_a_watermark_that_is_no_share_is_refused(watermark: float) -> None:
    with pytest.raises(ValueError, match=rf"watermark must lie in \(0, 1\], got {watermark}"):
        new_pool(4, OldestFirst(watermark=watermark))


@pytest.mark.parametrize("name", ["q3", "Auto", ("q4",) * 3, ("auto", "q4"), ()])
def test_formats_that_there_are_not_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="is no page format: there are"):
        new_pool(4, name)
    with pytest.raises(ValueError, match="'q3' is no page format: there are"):
        new_pool(4, OldestFirst(page_formats=("q8", "q3")))


def test_rings_are_left_alone() -> None:
    model: Any = small_model("gemma3_text")
    factory = PagedCacheFactory(model, page_format="auto", max_bytes=24 * BLOCK_BYTES)
    cache = factory.make_cache()
    for at in range(0, 16 * 256, 512):
        model(mx.array([TOKENS[at : at + 512]]), cache=cache)
        assert_within_budget(factory.pool)
    windowed = [layer.layer in factory.pool.windows for layer in cache]
    assert set(windowed) == {True, False}
    for layer, has_window in zip(cache, windowed, strict=True):
        names = page_formats(factory.pool, layer.layer, layer.sequences[0])
        assert (set(names) == {"fp16"}) == has_window


@pytest.mark.parametrize("pages", [12, 15, 16, 18, 20])
def test_a_saved_cache_is_loaded_into_a_pool_that_it_nearly_fills(pages: int) -> None:
    """Layers arrive one by one, and the pages of one layer must not change for the next."""
    source = PagePool(LAYERS, max_bytes=1 << 28)
    caches = caches_of(source)
    write(caches, 256 * pages - 3)
    states = [cache.state for cache in caches]
    pool = new_pool(20)
    loaded = [PagedKVCache.from_state(state) for state in states]
    assert loaded[0].pool is pool
    assert_within_budget(pool)
    for ours, theirs in zip(loaded, caches, strict=True):
        found, expected = (cache.keys_and_values()[0] + 0 for cache in (ours, theirs))
        noise = float(mx.sum((found - expected) ** 2) / mx.sum(expected**2))
        assert noise < 0.01


def test_rows_of_a_batch_find_room_together() -> None:
    pool = new_pool(16)
    batch = [PagedKVCache.merge([cache] * 3) for cache in caches_of(pool)]
    for at in range(10):
        for cache in batch:
            numbers = mx.random.normal((3, 1, 256, HEAD)).astype(mx.float16)
            cache.update_and_fetch(numbers, numbers + at)
        assert_within_budget(pool)
    for sequence in batch[0].sequences:
        names = page_formats(pool, 0, sequence)
        assert len(names) == 10
        assert names[-1] == "fp16"
    assert pool.stats().requantisations["q8"] > 0


@pytest.mark.parametrize(
    ("blocks", "others"), plain_cases([(12, 0), (12, 3)], [(12, 0), (12, 3), (40, 1), (40, 3)])
)
def test_what_is_admitted_can_be_read_page_by_page(blocks: int, others: int) -> None:
    pool = new_pool(blocks)
    held = [caches_of(pool) for _ in range(others)]
    for caches in held:
        for _ in range(blocks // 5):
            write(caches, 256)
    if not pool.is_open:
        write(caches_of(pool), 1)
    most = bisect_right(range(8 * blocks), 0, key=lambda pages: not pool.can_admit(256 * pages)) - 1
    used = others * (blocks // 5)
    assert most > blocks - used
    new = caches_of(pool)
    for _ in range(most):
        write(new, 256)
        assert_within_budget(pool)
    assert pool.stats().allocation_failures == 0
