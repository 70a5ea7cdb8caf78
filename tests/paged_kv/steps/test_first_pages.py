"""A sequence's first full page has 8 bits where the others have 4, whatever becomes of it."""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted, Sequence
from paged_kv.cache.saved_state import page_formats
from paged_kv.integrations import page_identity
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.page_format import FP16, PageLayout
from paged_kv.trace.recorder import TracedPool
from paged_kv.trace.replay import Parameters, Replay, read_trace
from tests.support.full_pages import FIRST, full_formats
from tests.support.ring_batches import materialised
from tests.support.stored_prompts import TEXT, computed, found, stored_factory
from tests.support.zoo import small_model

HEAD = 32


def new_cache(name: str, **options: Any) -> PagedKVCache:
    pool = PagePool(1, page_format=name, **{"max_bytes": 1 << 24, **options})
    return PagedKVCache(pool, 0, [Sequence(pool)])


def write(cache: PagedKVCache, count: int) -> None:
    numbers = mx.random.normal((2, 1, 1, count, HEAD)).astype(mx.float16)
    cache.update_and_fetch(numbers[0], numbers[1])
    cache.pool.check()


def formats(cache: PagedKVCache) -> list[str]:
    return page_formats(cache.pool, cache.layer, cache.sequences[0])


def blocks(cache: PagedKVCache) -> tuple[int, ...]:
    return cache.sequences[0].blocks(cache.pool.group_of(cache.layer))


def recode(cache: PagedKVCache, page: int, name: str) -> None:
    """Give a page another format, for all that hold it."""
    (group,) = cache.pool.groups
    group.recode(
        lambda: [blocks(cache)[page]], name, lambda n: group.allocator.ensure_free({name: n})
    )


@pytest.mark.parametrize("name", [*FIRST, "q8", "fp16"])
@pytest.mark.parametrize(
    "steps", [(1100,), (200, 900), (256, 1, 843), (255, 1, 1, 843), (512, 588), (40, 300, 760)]
)
def test_one_page_has_more_bits_however_a_prompt_is_cut(name: str, steps: tuple[int, ...]) -> None:
    cache = new_cache(name)
    for count in steps:
        write(cache, count)
    write(cache, 1)
    assert formats(cache) == [*full_formats(name, 4), "fp16"]


def test_a_fork_that_is_trimmed_into_the_first_page_fills_it_again() -> None:
    cache = new_cache("q4")
    write(cache, 600)
    write(cache, 1)
    fork = copy.deepcopy(cache)
    fork.trim(401)
    assert formats(fork) == ["q8"]
    assert blocks(fork) == blocks(cache)[:1]
    write(fork, 1)
    assert formats(fork) == ["fp16"]
    write(fork, 300)
    # The first page, which the step began in, keeps 16 bits until the next one.
    assert formats(fork) == ["fp16", "fp16"]
    write(fork, 300)
    assert formats(fork) == ["q8", "fp16", "q4", "fp16"]
    write(fork, 1)
    assert formats(fork) == ["q8", "q4", "q4", "fp16"]
    assert formats(cache) == ["q8", "q4", "fp16"]


def test_a_trim_to_nothing_begins_a_first_page() -> None:
    cache = new_cache("q4")
    for _ in range(2):
        write(cache, 600)
        write(cache, 1)
        assert formats(cache) == ["q8", "q4", "fp16"]
        cache.trim(601)


@pytest.mark.parametrize(("name", "bits"), [("q8", 4), ("q4", 8)])
def test_a_conversion_leaves_a_first_page_that_has_its_format(name: str, bits: int) -> None:
    cache = new_cache(name)
    write(cache, 1100)
    before = blocks(cache)
    cache.to_quantized(bits=bits)
    assert formats(cache) == [*full_formats(f"q{bits}", 4), "fp16"]
    assert blocks(cache)[0] == before[0]
    assert not set(blocks(cache)[1:4]) & set(before)
    write(cache, 300)
    write(cache, 1)
    assert formats(cache) == [*full_formats(f"q{bits}", 5), "fp16"]


def test_a_first_page_that_is_filled_after_a_conversion_has_8_bits() -> None:
    cache = new_cache("fp16")
    write(cache, 100)
    cache.to_quantized(bits=4)
    write(cache, 600)
    write(cache, 1)
    assert formats(cache) == ["q8", "q4", "fp16"]


def test_a_conversion_of_several_sequences_converts_a_shared_first_page_once() -> None:
    cache = new_cache("fp16")
    write(cache, 1100)
    fork = copy.deepcopy(cache)
    both = PagedKVCache(cache.pool, 0, [*cache.sequences, *fork.sequences])
    both.to_quantized(bits=4)
    assert formats(cache) == formats(fork) == ["q8", "q4", "q4", "q4", "fp16"]
    assert blocks(cache) == blocks(fork)


def test_a_first_page_that_memory_does_not_hold_is_recoded_later() -> None:
    page = PageLayout(FP16, LayerGeometry(1, HEAD, mx.float16, 1, HEAD, mx.float16)).page_bytes
    cache = new_cache("q4", max_bytes=8 * page)
    other = PagedKVCache(cache.pool, 0, [Sequence(cache.pool, FP16)])
    write(cache, 256)
    write(other, 7 * 256)
    with pytest.raises(PoolExhausted):
        write(cache, 1)
    assert formats(cache) == ["fp16"]
    other.trim(7 * 256)
    write(cache, 600)
    write(cache, 1)
    assert formats(cache) == ["q8", "q4", "q4", "fp16"]


def test_prompts_share_a_cached_first_page() -> None:
    model: Any = small_model("qwen3")
    factory = PagedCacheFactory(model, page_format="q4", max_bytes=64 << 20)
    first = factory.make_cache()
    mx.eval(model(mx.array([TEXT[:600]]), cache=first))
    factory.insert_cache(TEXT[:600], first)
    second, cached = factory.fetch_cache([*TEXT[:512], 1, 2])
    assert cached == 512
    assert formats(second[0]) == ["q8", "q4"]
    assert blocks(second[0]) == blocks(first[0])[:2]
    model(mx.array([[1]]), cache=second)
    assert formats(second[0]) == ["q8", "q4", "fp16"]


def test_a_store_gives_back_pages_in_their_formats(tmp_path: Path) -> None:
    model: Any = small_model("qwen3")
    factory = stored_factory(model, tmp_path, page_format="q4")
    computed(model, factory, TEXT[:1000])
    factory.close()
    factory = stored_factory(model, tmp_path, page_format="q4")
    cache, cached = factory.fetch_cache([*TEXT[:1000], 1])
    assert cached == 1000
    assert formats(cache[0]) == ["q8", "q4", "q4", "fp16"]
    factory.close()


@pytest.mark.parametrize(("name", "cached"), [("q4", 0), ("q8", 599)])
def test_what_earlier_versions_stored_is_found_if_its_pages_are_the_same(
    name: str, cached: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They named the format of full pages, which the first page had too."""
    model: Any = small_model("qwen3")
    with monkeypatch.context() as patch:
        patch.setattr(page_identity, "_of_full_pages", lambda page_format: page_format.name)
        factory = stored_factory(model, tmp_path, page_format=name)
        computed(model, factory, TEXT[:600])
        factory.close()
    assert found(model, tmp_path, TEXT[:600], page_format=name) == cached


def test_a_saved_cache_keeps_the_formats_of_its_pages() -> None:
    cache = new_cache("q4")
    write(cache, 600)
    loaded = PagedKVCache.from_state(materialised(cache.state))
    assert formats(loaded) == ["q8", "q4", "fp16"]
    assert not loaded.sequences[0].is_converting
    for saved, held in zip(cache.keys_and_values(), loaded.keys_and_values(), strict=True):
        assert mx.array_equal(mx.array(saved), mx.array(held))
    write(loaded, 300)
    write(loaded, 1)
    assert formats(loaded) == ["q8", "q4", "q4", "fp16"]


@pytest.mark.parametrize(("page", "name"), [(0, "q4"), (1, "q8")])
def test_a_saved_cache_that_was_being_converted_goes_on(page: int, name: str) -> None:
    """A conversion that ran out of memory left such pages."""
    cache = new_cache("q4")
    write(cache, 600)
    recode(cache, page, name)
    loaded = PagedKVCache.from_state(materialised(cache.state))
    assert formats(loaded) == [name, name, "fp16"]
    assert loaded.sequences[0].is_converting
    write(loaded, 300)
    write(loaded, 1)
    assert formats(loaded) == [name, name, "fp16", "fp16"]
    loaded.to_quantized(bits=4)
    assert formats(loaded) == ["q8", "q4", "q4", "fp16"]


@pytest.mark.parametrize(("name", "words"), [("q4", "q4 q8"), ("q8", "q8"), ("fp16", "fp16")])
def test_a_replayed_trace_has_the_same_first_pages(tmp_path: Path, name: str, words: str) -> None:
    path = tmp_path / "trace"
    cache = new_cache(name, trace=str(path))
    for count in (200, 400, 1):
        write(cache, count)
    fork = copy.deepcopy(cache)
    fork.trim(400)
    for count in (100, 300, 1):
        write(fork, count)
    events: Any = cache.pool.counts.events
    assert isinstance(events, TracedPool)
    events.flush()
    assert f"n 0 0 {words}" in path.read_text().splitlines()
    replay = Replay(read_trace(path), Parameters())
    recorded = cache.pool.stats()
    assert replay.run().stats.blocks_by_format == recorded.blocks_by_format
    assert recorded.blocks_by_format.get("q8", 0) == {"q4": 2, "q8": 4, "fp16": 0}[name]


def test_a_trace_of_an_earlier_version_is_replayed_as_it_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    lines = ["P 0 0 10000 old", "B 0 100 fp16", "B 0 30 q4", "G 0 0 0 0 0 0"]
    lines += ["n 0 0 q4", "w 0 0 600 3", "w 0 600 601 0"]
    header = '{"paged_kv_trace": 1, "page_size": 256, "time": 0}'
    path.write_text("\n".join([header, *lines, ""]))
    outcome = Replay(read_trace(path), Parameters()).run()
    assert outcome.stats.blocks_by_format == {"fp16": 1, "q4": 2}
