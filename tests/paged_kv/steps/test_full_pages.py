"""A token attends to its own page in 16 bits and to every earlier page in its final format, however
a prompt is cut into steps."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted
from paged_kv.cache.saved_state import page_formats
from paged_kv.integrations import stored_pages
from paged_kv.kernels.pages.page_format import FP16, LayerGeometry, PageLayout, page_format_named
from paged_kv.prefix import prefix_cache
from tests.support import stored_prompts
from tests.support.attended_step import attended
from tests.support.full_pages import FIRST, full_format, full_formats
from tests.support.layer_caches import caches_of
from tests.support.zoo import small_model

HEAD = 32
PAGE_BYTES = PageLayout(FP16, LayerGeometry(1, HEAD, mx.float16, 1, HEAD, mx.float16)).page_bytes
attention = mx.fast.scaled_dot_product_attention


def new_cache(name: str) -> PagedKVCache:
    return caches_of(PagePool(1, page_format=name, max_bytes=1 << 24))[0]


def numbers(count: int, seed: int = 0) -> mx.array:
    return mx.random.normal((1, 1, count, HEAD), key=mx.random.key(seed)).astype(mx.float16)


def write(caches: list[PagedKVCache], count: int, seed: int = 0) -> None:
    for cache in caches:
        cache.update_and_fetch(numbers(count, seed), numbers(count, seed + 1))
        cache.pool.check()


def formats(cache: PagedKVCache) -> list[str]:
    return page_formats(cache.pool, cache.layer, cache.sequences[0])


def contents(cache: PagedKVCache) -> mx.array:
    found = mx.concatenate([array + 0 for array in cache.keys_and_values()])
    mx.eval(found)
    return found


def decoded(held: mx.array, name: str, part: str) -> mx.array:
    """The keys or values of a page as that format holds them."""
    page_format = page_format_named(name)
    number_format = page_format.keys if part == "keys" else page_format.values
    return number_format.decode(number_format.encode(held), held.dtype)


def pages_of(cache: PagedKVCache) -> list[mx.array]:
    """The full pages as they are, and the tokens after them."""
    pages = cache.pool.group_of(cache.layer).pages[cache.layer]
    full = cache.offset // 256
    blocks = cache.sequences[0].blocks(cache.pool.group_of(cache.layer))
    raw = [mx.array(pages.page(block)) for block in blocks[:full]]
    rest = cache.offset - 256 * full
    return [*raw, *([contents(cache)[:, :, -rest:]] if rest else [])]


def written_in_steps(name: str, keys: mx.array, size: int) -> tuple[PagedKVCache, mx.array]:
    """A cache with these keys as keys and values, and what each token attended to, with itself as
    the query. The last token is a step of its own."""
    cache = new_cache(name)
    before = keys.shape[2] - 1
    ends = [*range(size, before, size), before, keys.shape[2]]
    outputs = [attended(cache, keys[:, :, start:end]) for start, end in pairwise([0, *ends])]
    cache.pool.check()
    return cache, mx.concatenate(outputs, axis=2)


def expected(name: str, keys: mx.array) -> mx.array:
    """What each token attends to, one page after the other."""
    seen = {"keys": keys[:, :, :0], "values": keys[:, :, :0]}
    outputs = []
    for start in range(0, keys.shape[2], 256):
        own = keys[:, :, start : start + 256]
        held = [mx.concatenate([each, own], axis=2) for each in seen.values()]
        outputs.append(attention(own, *held, scale=1.0, mask="causal"))
        seen = {
            part: mx.concatenate([each, decoded(own, full_format(name, start), part)], axis=2)
            for part, each in seen.items()
        }
    return mx.concatenate(outputs, axis=2)


@pytest.mark.parametrize(("name", "size"), [("q4", 7), ("q4", 300), ("q8", 255), ("q4", 256)])
def test_a_token_sees_the_same_however_the_prompt_is_cut(
    name: str, size: int, backend: str
) -> None:
    keys = numbers(770 if size > 7 else 530, seed=1).astype(mx.float32)
    cache, outputs = written_in_steps(name, keys, size)
    assert float(mx.abs(outputs - expected(name, keys)).max()) < 1e-4
    at_once, _ = written_in_steps(name, keys, 4096)
    assert formats(cache)[:2] == full_formats(name, 2)
    for found, page in zip(pages_of(cache), pages_of(at_once), strict=True):
        assert mx.array_equal(found, page)


def test_attention_that_pages_cannot_express_gathers_the_step_as_it_was_given() -> None:
    cache = new_cache("q4")
    keys = numbers(900, seed=2).astype(mx.float32)
    attended(cache, keys[:, :, :300])
    cache.make_mask(600)
    found, _ = cache.update_and_fetch(keys[:, :, 300:], keys[:, :, 300:])
    assert found.read.attend(keys[:, :, 300:], None, scale=1.0) is None
    gathered = mx.array(found.read.gather()[0])
    assert mx.array_equal(gathered[:, :, 256:], keys[:, :, 256:])
    assert 1e-2 < float(mx.abs(gathered - keys).max()) < 0.5


def test_a_page_waits_for_all_layers() -> None:
    pool = PagePool(2, page_format="q4", max_bytes=1 << 24)
    caches = caches_of(pool)
    for _ in range(2):
        write(caches, 50)
    write(caches[:1], 200)
    write(caches[:1], 1)
    assert formats(caches[0]) == ["fp16", "fp16"]
    write(caches[1:], 201, seed=7)
    assert mx.array_equal(caches[1].keys_and_values()[0][:, :, 100:], numbers(201, 7))
    write(caches, 1)
    assert formats(caches[0]) == formats(caches[1]) == ["q8", "fp16"]


def test_what_is_found_is_what_the_sequence_itself_goes_on_with() -> None:
    model: Any = small_model("llama")
    factory = PagedCacheFactory(model, page_format="q4", max_bytes=64 << 20)
    prompt = [(7 * i * i + 3 * i + 1) % 97 for i in range(600)]
    cache = factory.make_cache()
    for part in (prompt[:200], prompt[200:]):
        mx.eval(model(mx.array([part]), cache=cache))
    full = [layer for layer in cache if factory.pool.group_of(layer.layer).window is None]
    assert all(formats(layer) == ["fp16", "q4", "fp16"] for layer in full)
    factory.insert_cache(prompt, cache)
    assert all(formats(layer) == ["q8", "q4", "fp16"] for layer in full)
    found, cached = factory.fetch_cache([*prompt, 1])
    assert cached == 600
    expected = model(mx.array([[1]]), cache=cache)
    assert mx.array_equal(model(mx.array([[1]]), cache=found), expected)


@pytest.mark.parametrize("kept", [300, 200])
def test_what_could_not_be_recoded_is_not_resumed_within_its_page(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is too short when a prompt is inserted. Its next step recodes a page that another
    prompt would have begun within."""
    model: Any = small_model("llama")
    factory = PagedCacheFactory(model, page_format="q4", max_bytes=64 << 20)
    prompt = [(7 * i * i + 3 * i + 1) % 97 for i in range(300)]
    cache = factory.make_cache()
    for part in (prompt[:200], prompt[200:]):
        mx.eval(model(mx.array([part]), cache=cache))
    layer = next(each for each in cache if factory.pool.windows.get(each.layer) is None)
    assert formats(layer) == ["fp16", "fp16"]
    exhausted = PoolExhausted(needed=1, free=0, evictable=0, budget=1, block_bytes=1)
    with monkeypatch.context() as patch:
        patch.setattr(prefix_cache, "recode_sequence", Mock(side_effect=exhausted))
        assert factory.insert_cache(prompt[:kept], cache) == (300 if kept == 300 else 0)
    other = [*prompt[:190], 1, 2, 3]
    found, cached = factory.fetch_cache(other)
    mx.eval(model(mx.array([[1]]), cache=cache))
    assert formats(layer) == ["q8", "fp16"]
    outputs = model(mx.array([other[cached:]]), cache=found)[0, -1]
    cold = PagedCacheFactory(model, page_format="q4", max_bytes=64 << 20).make_cache()
    assert float(mx.abs(outputs - model(mx.array([other]), cache=cold)[0, -1]).max()) < 1e-4


def test_a_conversion_that_ran_out_of_memory_leaves_to_others_what_they_share() -> None:
    pool = PagePool(1, max_bytes=8 * PAGE_BYTES)
    (cache,), (other,) = caches_of(pool), caches_of(pool)
    write([cache], 600)
    fork = copy.deepcopy(cache)
    write([other], 5 * 256)
    before = contents(fork)
    with pytest.raises(PoolExhausted):
        cache.to_quantized(bits=4)
    other.trim(5 * 256)
    write([cache], 1)
    assert formats(fork) == ["fp16"] * 3
    assert mx.array_equal(contents(fork), before)
    cache.to_quantized(bits=4)
    assert (formats(cache), formats(fork)) == (["q8", "q4", "fp16"], ["fp16"] * 3)


def blocks(cache: PagedKVCache) -> tuple[int, ...]:
    return cache.sequences[0].blocks(cache.pool.group_of(cache.layer))


@pytest.mark.parametrize("name", [*FIRST, "q8"])
@pytest.mark.parametrize(
    "steps", [(1100,), (200, 900), (256, 1, 843), (255, 1, 1, 843), (40, 300, 760)]
)
def test_one_page_has_more_bits_however_a_prompt_is_cut(name: str, steps: tuple[int, ...]) -> None:
    cache = new_cache(name)
    for count in steps:
        write([cache], count)
    write([cache], 1)
    assert formats(cache) == [*full_formats(name, 4), "fp16"]


def test_a_fork_that_is_trimmed_into_the_first_page_fills_it_again() -> None:
    cache = new_cache("q4")
    write([cache], 600)
    write([cache], 1)
    fork = copy.deepcopy(cache)
    fork.trim(401)
    assert formats(fork) == ["q8"]
    assert blocks(fork) == blocks(cache)[:1]
    write([fork], 1)
    assert formats(fork) == ["fp16"]
    write([fork], 300)
    # The first page, which the step began in, keeps 16 bits until the next one.
    assert formats(fork) == ["fp16", "fp16"]
    write([fork], 300)
    assert formats(fork) == ["q8", "fp16", "q4", "fp16"]
    write([fork], 1)
    assert formats(fork) == ["q8", "q4", "q4", "fp16"]
    assert formats(cache) == ["q8", "q4", "fp16"]
    # One that nobody shares has 16 bits too once it is written again.
    cache.trim(201)
    held = contents(cache)
    write([cache], 1)
    assert formats(cache) == ["q8", "fp16"]
    assert mx.array_equal(contents(cache)[:, :, :400], held)
    cache.trim(401)
    write([cache], 300)
    write([cache], 1)
    assert formats(cache) == ["q8", "fp16"]


@pytest.mark.parametrize(("name", "bits"), [("q8", 4), ("q4", 8)])
def test_a_conversion_leaves_a_first_page_that_has_its_format(name: str, bits: int) -> None:
    cache = new_cache(name)
    write([cache], 1100)
    before = blocks(cache)
    cache.to_quantized(bits=bits)
    assert formats(cache) == [*full_formats(f"q{bits}", 4), "fp16"]
    assert blocks(cache)[0] == before[0]
    assert not set(blocks(cache)[1:4]) & set(before)
    write([cache], 300)
    write([cache], 1)
    assert formats(cache) == [*full_formats(f"q{bits}", 5), "fp16"]


def test_a_first_page_that_is_filled_after_a_conversion_has_8_bits() -> None:
    cache = new_cache("fp16")
    write([cache], 100)
    cache.to_quantized(bits=4)
    write([cache], 600)
    write([cache], 1)
    assert formats(cache) == ["q8", "q4", "fp16"]


@pytest.mark.parametrize(("name", "cached"), [("q4", 0), ("q8", 512)])
def test_what_earlier_versions_stored_is_found_if_its_pages_are_the_same(
    name: str, cached: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They named the format of full pages, which the first page had too."""
    model: Any = small_model("qwen3", num_hidden_layers=1)
    with monkeypatch.context() as patch:
        patch.setattr(stored_pages, "_of_full_pages", lambda page_format: page_format.name)
        factory = stored_prompts.stored_factory(model, tmp_path, page_format=name)
        stored_prompts.computed(model, factory, stored_prompts.TEXT[:600])
        factory.close()
    assert (
        stored_prompts.found(model, tmp_path, stored_prompts.TEXT[:600], page_format=name) == cached
    )
