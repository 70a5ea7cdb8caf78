"""mlx-lm's kv_bits requantises the pages of the caches that the caller holds."""

import copy
import gc
import logging
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.generate import generate_step

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted, Sequence
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.cache.saved_state import page_formats
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.warn_once import warn_once
from tests.support.followed_caches import FollowedCache, farthest, followed_caches
from tests.support.full_pages import full_formats
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


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages each copy in a layer has turned into smaller ones."""
    counts: list[int] = []
    copy = LayerPages.copy

    def counted(pages: LayerPages, copies: dict[int, int]) -> None:
        sizes = [[pages.layout_of(block).page_bytes for block in pair] for pair in copies.items()]
        counts.append(sum(target < source for source, target in sizes))
        copy(pages, copies)

    monkeypatch.setattr(LayerPages, "copy", counted)
    return counts


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("start", "name"), [(0, "stdlib-llama"), (250, "stdlib-gemma3")])
def test_pages_hold_what_a_cache_does_that_is_converted_at_the_same_step(
    bits: int, start: int, name: str, trained: Any, source_text: str, conversions: list[int]
) -> None:
    model, tokenizer = trained(name)
    prompt = tokenizer.encode(source_text[20000:26000])[:380]
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
    assert all(set(names[1:]) == {"fp16"} for names in formats.values())
    # The first page was recoded for the step that left it, unless it had 16 bits then, and later.
    assert sum(conversions) == len(full) * (1 if start else 2)
    del cache, held
    assert_written_and_free(factory)


def test_stream_generate_converts_too(trained: Any) -> None:
    model, tokenizer = trained("stdlib-llama")
    factory = PagedCacheFactory(model)
    distances: list[mx.array] = []
    cache = followed_caches(model, factory, "fp16", distances)
    responses = stream_generate(
        model,
        tokenizer,
        "def read_file(path):\n",
        max_tokens=20,
        prompt_cache=cache,
        kv_bits=8,
        quantized_kv_start=10,
    )
    assert "".join(response.text for response in responses)
    assert farthest(distances) <= 1
    assert {layer.paged.sequences[0].page_format.name for layer in cache} == {"q8"}


@pytest.fixture
def model() -> Iterator[Any]:
    yield small_model("llama")
    gc.collect()


def test_a_second_conversion_costs_nothing(model: Any, conversions: list[int]) -> None:
    cache = PagedCacheFactory(model, max_bytes=64 << 20).make_cache()
    greedy(model, PROMPT, cache, 1)
    for layer in cache:
        assert layer.to_quantized(group_size=32, bits=4) is layer
    done = len(conversions)
    before = [contents(layer) for layer in cache]
    for layer in cache * 2:
        layer.to_quantized(group_size=32, bits=4)
    assert len(conversions) == done > 0
    assert all(
        mx.array_equal(one, contents(layer)) for one, layer in zip(before, cache, strict=True)
    )


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


@pytest.mark.parametrize("bits", [3, 2, 16, 0])
def test_other_bits_are_refused_and_change_nothing(model: Any, bits: int) -> None:
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    distances: list[mx.array] = []
    cache = followed_caches(model, factory, "fp16", distances)
    greedy(model, PROMPT, cache, 1)
    before = factory.stats()
    with pytest.raises(ValueError, match=f"kv_bits must be 4 or 8 .*, got {bits}"):
        cache[0].to_quantized(bits=bits)
    assert factory.stats() == before
    greedy(model, [5, 6], cache, 4)
    assert farthest(distances) <= 1


def test_a_ragged_batch_is_converted_row_by_row(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    rows = [PROMPT[:300], PROMPT[9:40], PROMPT[5:261]]
    distances: list[mx.array] = []
    alone = [followed_caches(model, factory, "fp16", distances) for _ in rows]
    for row, cache in zip(rows, alone, strict=True):
        greedy(model, row, cache, 1)
    batch = [FollowedCache.merge(list(layers)) for layers in zip(*alone, strict=True)]
    for layer in batch:
        layer.to_quantized(group_size=32, bits=8)
    for token in (3, 4, 5):
        mx.eval(model(mx.array([[token]] * 3), cache=batch), distances)
    assert farthest(distances) <= 1
    # What was merged has its 16 bits still, in five blocks and three rings. Of the batch, two pages
    # were full, and six are written.
    assert factory.stats().blocks_by_format == {"fp16": 8 + 6, "q8": 2}


@pytest.mark.parametrize("bits", [4, 8])
def test_forks_from_before_keep_their_pages_bit_for_bit(bits: int) -> None:
    pool = PagePool(2, max_bytes=1 << 24)
    caches = caches_of(pool)
    write(caches, 600)
    fork = copy.deepcopy(caches)
    blocks = fork[0].sequences[0].blocks(pool.groups[0])
    before = [contents(cache) for cache in fork]
    for cache in caches:
        cache.to_quantized(group_size=32, bits=bits)
    assert fork[0].sequences[0].blocks(pool.groups[0]) == blocks
    assert all(mx.array_equal(b, contents(cache)) for b, cache in zip(before, fork, strict=True))
    assert not mx.array_equal(before[0], contents(caches[0]))
    write(fork, 3)
    write(caches, 3)
    assert page_formats(pool, 0, fork[0].sequences[0]) == ["fp16"] * 3
    assert page_formats(pool, 0, caches[0].sequences[0]) == ["q8", f"q{bits}", "fp16"]
    pool.check()


def test_rows_that_share_pages_share_them_converted() -> None:
    """Eight samples of one prompt must not need eight times its pages."""
    pool = PagePool(1, max_bytes=1 << 24)
    (cache,) = caches_of(pool)
    write([cache], 2560)
    batch = PagedKVCache.merge([cache] * 8)
    assert pool.stats().blocks_used == 10
    batch.to_quantized(group_size=32, bits=4)
    assert pool.stats().blocks_by_format == {"fp16": 10, "q8": 1, "q4": 9}


@pytest.mark.parametrize("tokens", [300, 2000, 9000])
@pytest.mark.parametrize(("first", "then"), [("fp16", 4), ("fp16", 8), ("q4", 8), ("q8", 4)])
def test_a_conversion_maps_one_slab_more_at_most(
    tokens: int, first: str, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(1, max_bytes=128 * PAGE_BYTES, page_format=first)
    (cache,) = caches_of(pool)
    write([cache], tokens)
    before, slabs = pool.budget.mapped, dict(pool.groups[0].allocator.slabs)
    peak, take = before, ByteBudget.take

    def noted(budget: ByteBudget, nbytes: int) -> None:
        nonlocal peak
        take(budget, nbytes)
        peak = max(peak, budget.mapped)

    monkeypatch.setattr(ByteBudget, "take", noted)
    cache.to_quantized(group_size=32, bits=then)
    pool.clear()
    after = pool.budget.mapped
    allocator = pool.groups[0].allocator
    pages = max([*slabs.values(), *allocator.slabs.values()])
    slab_bytes = pages * max(each.block_bytes for each in allocator.formats)
    assert peak <= max(before, after) + slab_bytes
    full = tokens // 256
    expected = full_formats(f"q{then}", full)
    assert page_formats(pool, 0, cache.sequences[0]) == [*expected, "fp16"]
    pool.check()


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


def test_a_cache_that_is_converted_empty_takes_a_batch() -> None:
    pool = PagePool(1, max_bytes=1 << 24)
    (cache,) = caches_of(pool)
    cache.to_quantized(group_size=32, bits=4)
    write([cache], 256, rows=3)
    write([cache], 1, rows=3)
    assert pool.stats().blocks_by_format == {"fp16": 3, "q8": 3, "q4": 0}


def test_what_was_read_before_a_conversion_can_be_attended_to(model: Any) -> None:
    """The step's arrays still stand for the pages, so a model can read a layer's keys again."""
    from mlx_lm.models import base

    cache = PagedCacheFactory(model, max_bytes=64 << 20).make_cache()
    greedy(model, PROMPT, cache, 1)
    keys, values = cache[0].keys_and_values()
    queries = mx.random.normal((1, 4, 1, HEAD))

    def attend(keys: Any, values: Any) -> mx.array:
        result: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache=cache[0], scale=1.0, mask=None
        )
        mx.eval(result)
        return result

    expected = attend(mx.array(keys), mx.array(values))
    cache[0].to_quantized(group_size=32, bits=8)
    found = attend(keys, values)
    assert float(mx.abs(found - expected).max()) < 0.1


@pytest.mark.parametrize("page_format", ["q4", "q8", ("fp16", "q4"), "auto"])
def test_a_head_size_that_does_not_divide_is_refused_at_the_first_write(page_format: Any) -> None:
    pool = PagePool(2, max_bytes=1 << 24, page_format=page_format)
    caches = caches_of(pool)
    with pytest.raises(ValueError, match=r"layer 0: .* divide by 32, got 48"):
        write(caches, 10, head=48)
    assert ({cache.offset for cache in caches}, pool.stats().blocks_used) == ({0}, 0)
    pool.check()


def test_a_first_step_that_a_later_layer_refuses_is_undone() -> None:
    """The pool does this when memory is short."""
    pool = PagePool(2, max_bytes=1 << 24, page_format="q4")
    caches = caches_of(pool)
    write(caches[:1], 10)
    with pytest.raises(ValueError, match=r"layer 1: .* divide by 32, got 48"):
        write(caches[1:], 10, head=48)
    assert [cache.offset for cache in caches] == [0, 0]
    assert pool.stats().blocks_used == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_a_head_size_that_does_not_divide_is_refused_at_conversion(bits: int) -> None:
    pool = PagePool(2, max_bytes=1 << 24)
    caches = caches_of(pool)
    write(caches[:1], 300)
    write(caches[1:], 300, head=80)
    before, stats = [contents(cache) for cache in caches], pool.stats()
    with pytest.raises(ValueError, match=r"layer 1: .* divide by 32, got 80"):
        caches[0].to_quantized(group_size=32, bits=bits)
    assert pool.stats() == stats
    assert all(mx.array_equal(b, contents(cache)) for b, cache in zip(before, caches, strict=True))
    write(caches[:1], 300)
    write(caches[1:], 300, head=80)
    assert pool.stats().blocks_by_format == {"fp16": 3}
