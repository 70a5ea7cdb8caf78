"""A sequence with pages of several formats at once, beside a list of its tokens."""

import copy
import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, Sequence
from paged_kv.allocator.block_table import BlockTable
from paged_kv.cache.saved_state import page_formats
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.page_format import page_format_named
from tests.support.followed_caches import FollowedCache, farthest, followed_caches
from tests.support.quantised_oracle import QuantisedOracle
from tests.support.zoo import small_model

HEAD = 32
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def assert_same_codes(found: mx.array, expected: mx.array) -> None:
    """All but one in a thousand, which another order of sums may round to a neighbour."""
    differing = mx.abs(found - expected) > 1e-2 * mx.abs(expected).max()
    assert float(differing.mean()) <= 1e-3


class Both:
    """A paged cache of one layer and its oracle, which get the same writes."""

    def __init__(self, pool: PagePool) -> None:
        self.paged = PagedKVCache(pool, 0, [Sequence(pool)])
        self.oracle = QuantisedOracle("fp16")

    @property
    def sequence(self) -> Sequence:
        return self.paged.sequences[0]

    @property
    def table(self) -> BlockTable:
        return self.sequence.table(self.paged.pool.groups[0])

    @property
    def formats(self) -> list[str]:
        return page_formats(self.paged.pool, 0, self.sequence)

    def write(self, count: int, dtype: mx.Dtype = mx.float32) -> None:
        numbers = mx.random.normal((2, 1, 2, count, HEAD)).astype(dtype)
        self.paged.update_and_fetch(numbers[0], numbers[1])
        self.oracle.update_and_fetch(numbers[0], numbers[1])

    def requantise(self, page: int, name: str) -> None:
        """Convert pages as the pool does when memory is short."""
        group = self.paged.pool.groups[0]
        group.add_formats(page_format_named(name))
        group.allocator.ensure_free({name: 1})
        moves = {self.table.blocks[page]: group.allocator.format_named(name).free[0]}
        for pages in group.pages.values():
            pages.copy(moves)
        group.moves += 1
        group.allocator.apply_moves(moves)
        self.oracle.hold(page, page_format_named(name))

    def trim(self, count: int) -> None:
        assert self.paged.trim(count) == self.oracle.trim(count) == count

    def assert_alike(self) -> None:
        for found, expected in zip(
            self.paged.keys_and_values(), self.oracle.keys_and_values(), strict=True
        ):
            assert_same_codes(found, expected)
        self.paged.pool.check()


def mixed(dtype: mx.Dtype = mx.float32) -> Both:
    """Pages of fp16, q8, q4, q8/q4 and fp16, of which the last is half full."""
    mx.random.seed(0)
    both = Both(PagePool(1, max_bytes=1 << 24))
    both.write(500, dtype)
    both.write(624, dtype)
    for page, name in enumerate(("q8", "q4", "q8/q4"), 1):
        both.requantise(page, name)
    assert both.formats == ["fp16", "q8", "q4", "q8/q4", "fp16"]
    return both


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_gathered_from_pages_of_all_formats(dtype: mx.Dtype) -> None:
    mixed(dtype).assert_alike()


@pytest.mark.parametrize("queries", [1, 5, 300])
@pytest.mark.parametrize("window", [None, 40, 400])
def test_attention_reads_all_formats(queries: int, window: int | None) -> None:
    both = mixed()
    both.write(queries)
    step = mx.random.normal((1, 4, queries, HEAD))
    length = both.oracle.offset
    at = mx.arange(length)
    hides = at[None] > at[-queries:, None]
    if window:
        hides = hides | (at[None] <= at[-queries:, None] - window)
    pages = both.paged.pool.groups[0].pages[0]
    metadata = both.paged.keys_and_values()[0].read.group_step.metadata
    found = pages.attend(step, metadata, Attention(0.2, causal=True, window=window))
    keys, values = both.oracle.keys_and_values()
    expected = scaled_dot_product_attention(step, keys, values, cache=None, scale=0.2, mask=~hides)
    assert float(mx.abs(found - expected).max()) < 1e-5


@pytest.mark.parametrize("back", [1, 99, 100, 101, 300, 356, 400, 700, 1100])
def test_a_page_that_a_trim_leaves_in_part_has_16_bits_once_it_is_written(back: int) -> None:
    both = mixed()
    before, whole = both.formats, (both.oracle.offset - back) // 256
    both.trim(back)
    assert both.formats == before[: len(both.formats)]
    both.assert_alike()
    both.write(30)
    assert both.formats[:whole] == before[:whole]
    assert set(both.formats[whole:]) == {"fp16"}
    both.assert_alike()
    both.write(600)
    both.assert_alike()


def test_a_shared_page_is_copied_into_16_bits() -> None:
    both = mixed()
    both.trim(300)
    fork = copy.deepcopy(both.paged)
    names = both.formats
    assert names[-1] == "q8/q4"
    before = mx.array(fork.keys_and_values()[0])
    both.write(20)
    both.assert_alike()
    assert page_formats(fork.pool, 0, fork.sequences[0]) == names
    assert both.formats == [*names[:-1], "fp16"]
    assert mx.array_equal(mx.array(fork.keys_and_values()[0]), before)
    assert both.paged.pool.stats().cow_copies == 1


def test_a_conversion_turns_pages_of_all_formats() -> None:
    both = mixed()
    assert both.paged.to_quantized(group_size=32, bits=8) is both.paged
    both.oracle.to_quantized(bits=8)
    assert both.formats == ["q8"] * 4 + ["fp16"]
    found, expected = (cache.keys_and_values()[0] for cache in (both.paged, both.oracle))
    both.assert_alike()
    assert found.shape == expected.shape
    both.paged.pool.clear()
    both.paged.pool.check()
    stats = both.paged.pool.stats()
    assert {name: used for name, used in stats.blocks_by_format.items() if used} == {
        "fp16": 1,
        "q8": 4,
    }


def test_formats_come_back_from_a_file(tmp_path: Path) -> None:
    both = mixed()
    PagedCacheFactory(small_model("llama")).make_cache()  # mlx-lm needs to know the class.
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, [both.paged])
    other = PagePool(1, max_bytes=1 << 24)
    (loaded,) = load_prompt_cache(file)
    assert loaded.pool is other
    assert page_formats(other, 0, loaded.sequences[0]) == both.formats
    for found, expected in zip(
        loaded.keys_and_values(), both.oracle.keys_and_values(), strict=True
    ):
        assert_same_codes(found, expected)
    both.paged = loaded
    both.write(300)
    both.assert_alike()


def test_a_batch_of_rows_of_different_formats() -> None:
    model: Any = small_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    tokens = [(7 * i * i + 3 * i + 1) % 97 for i in range(400)]
    distances: list[mx.array] = []
    caches = []
    for bits, length in ((None, 300), (8, 20), (4, 270)):
        cache = followed_caches(model, factory, "fp16", distances)
        mx.eval(model(mx.array([tokens[:length]]), cache=cache), distances)
        if bits:
            for layer in cache:
                layer.to_quantized(group_size=32, bits=bits)
        caches.append(cache)
    batch = [FollowedCache.merge(list(layers)) for layers in zip(*caches, strict=True)]
    for token in (3, 4):
        mx.eval(model(mx.array([[token]] * 3), cache=batch), distances)
    assert farthest(distances) <= 1
    del batch, caches, cache, layer
    gc.collect()
    assert factory.stats().blocks_used == 0
