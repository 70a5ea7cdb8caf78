"""mlx-lm's kv_bits requantises the pages of the caches that the caller holds."""

import copy
import gc
import logging
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted, Sequence
from paged_kv.cache.saved_state import page_formats
from paged_kv.kernels.pages.warn_once import warn_once
from tests.support.followed_caches import farthest, followed_caches
from tests.support.generation import assert_written_and_free, greedy
from tests.support.state_machine.table_model import TableModel
from tests.support.zoo import small_model

PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(430)]
NEW_TOKENS = 8
HEAD = 32
PAGE_BYTES = 2 * 256 * HEAD * 4


def generate(model: Any, prompt: list[int], cache: Any, **options: Any) -> None:
    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=NEW_TOKENS,
        prompt_cache=cache,
        prefill_step_size=100,
        **options,
    )
    assert len(list(steps)) == NEW_TOKENS


def caches_of(pool: PagePool) -> list[PagedKVCache]:
    sequence = Sequence(pool)
    return [PagedKVCache(pool, layer, [sequence]) for layer in range(pool.num_layers)]


def write(caches: list[PagedKVCache], count: int, *, rows: int = 1, head: int = HEAD) -> None:
    for cache in caches:
        cache.update_and_fetch(*(mx.random.normal((rows, 1, count, head)) for _ in range(2)))


def contents(cache: PagedKVCache) -> mx.array:
    found = mx.concatenate([array + 0 for array in cache.keys_and_values()])
    mx.eval(found)
    return found


@pytest.mark.parametrize(
    ("name", "bits", "start"), [("llama", 4, 0), ("llama", 8, 250), ("gemma3_text", 4, 250)]
)
@pytest.mark.slow
def test_pages_hold_what_a_cache_does_that_is_converted_at_the_same_step(
    name: str, bits: int, start: int
) -> None:
    model, prompt = small_model(name), PROMPT[:380]
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    distances: list[mx.array] = []
    cache = followed_caches(model, factory, "fp16", distances)
    held = list(cache)
    generate(model, prompt, cache, kv_bits=bits, quantized_kv_start=start, kv_group_size=32)
    assert farthest(distances) <= 1
    # The caller's caches are the same objects, and have grown to the last token.
    assert all(mine is theirs for mine, theirs in zip(cache, held, strict=True))
    assert {layer.offset for layer in held} == {len(prompt) + NEW_TOKENS}
    # The page that is written has 16 bits, and so have rings.
    formats = {
        layer.paged.layer: page_formats(factory.pool, layer.paged.layer, layer.paged.sequences[0])
        for layer in held
    }
    full = [layer for layer in formats if layer not in factory.pool.windows]
    assert {layer for layer in formats if formats[layer][0] == "q8"} == set(full)
    assert all(set(names[1:]) <= {"fp16"} for names in formats.values())
    del cache, held
    assert_written_and_free(factory)


@pytest.fixture
def model() -> Iterator[Any]:
    yield small_model("llama")
    gc.collect()


def test_other_group_sizes_are_accepted_and_said_once(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    distances: list[mx.array] = []
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    cache = followed_caches(model, factory, "fp16", distances)
    with caplog.at_level(logging.WARNING, logger="paged_kv"):
        generate(model, PROMPT, cache, kv_bits=4, kv_group_size=64, quantized_kv_start=0)
    said = [each.getMessage() for each in caplog.records]
    assert [text for text in said if "kv_group_size" in text] == [
        "kv_group_size=64 is not used: quantised pages have one scale for 32 numbers"
    ]
    assert farthest(distances) <= 1


def test_other_bits_are_refused_and_change_nothing(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    distances: list[mx.array] = []
    cache = followed_caches(model, factory, "fp16", distances)
    greedy(model, PROMPT, cache, 1)
    before = factory.stats()
    for bits in (3, 2, 16, 0):
        with pytest.raises(ValueError, match=f"got {bits}"):
            cache[0].to_quantized(bits=bits)
    assert factory.stats() == before
    greedy(model, [5, 6], cache, 4)
    assert farthest(distances) <= 1


def test_what_is_converted_in_part_is_not_found_as_what_it_was() -> None:
    """The pool is full when a conversion begins, and has room for more tokens later."""
    model: Any = TableModel((None,))
    factory = PagedCacheFactory(model, max_bytes=8 * 4 * PAGE_BYTES // 2)
    (cache,), other = factory.make_cache(), factory.make_cache()
    model(mx.array([PROMPT[:300]]), cache=[cache])
    model(mx.array([[*PROMPT, *PROMPT, *PROMPT, *PROMPT[:246]]]), cache=other)
    with pytest.raises(PoolExhausted):
        cache.to_quantized(group_size=32, bits=4)
    del other
    model(mx.array([PROMPT[:300]]), cache=[cache])
    # The step began within a page, whose recoded copy lasts as long as the step.
    assert factory.stats().blocks_by_format == {"fp16": 3, "q8": 0, "q4": 1}
    factory.insert_cache(PROMPT[:300] * 2, [cache])
    assert factory.fetch_cache(PROMPT[:300] * 2)[1] == 0
    # A second request continues the conversion, and so does a fork's request.
    fork = copy.deepcopy(cache)
    for each in (fork, cache):
        each.to_quantized(group_size=32, bits=4)
        assert page_formats(factory.pool, 0, each.sequences[0]) == ["q8", "q4", "fp16"]
    del fork, each
    factory.clear()
    assert factory.stats().blocks_by_format == {"fp16": 1, "q8": 1, "q4": 1}
    del cache
    assert_written_and_free(factory)


def test_a_head_size_that_does_not_divide_is_refused_at_the_first_write() -> None:
    formats: list[Any] = ["q4", ("fp16", "q4"), "auto"]
    for page_format in formats:
        pool = PagePool(2, max_bytes=1 << 24, page_format=page_format)
        caches = caches_of(pool)
        write(caches[:1], 10)
        with pytest.raises(ValueError, match="got 48"):
            write(caches[1:], 10, head=48)
        assert ({cache.offset for cache in caches}, pool.stats().blocks_used) == ({0}, 0)
        pool.check()


def test_a_head_size_that_does_not_divide_is_refused_at_conversion() -> None:
    pool = PagePool(2, max_bytes=1 << 24)
    caches = caches_of(pool)
    write(caches[:1], 300)
    write(caches[1:], 300, head=80)
    before, stats = [contents(cache) for cache in caches], pool.stats()
    with pytest.raises(ValueError, match="got 80"):
        caches[0].to_quantized(group_size=32, bits=4)
    assert pool.stats() == stats
    assert all(mx.array_equal(b, contents(cache)) for b, cache in zip(before, caches, strict=True))
    write(caches[:1], 300)
    write(caches[1:], 300, head=80)
    assert pool.stats().blocks_by_format == {"fp16": 3}
