"""The promises of a factory: limits, freed memory, caches saved beyond the process."""

import gc
import json
import logging
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache, save_prompt_cache

from paged_kv import PagedCacheFactory, PagedKVCache, PoolExhausted, PoolStats
from paged_kv.sizes import format_size
from tests.support.folders import ROOT
from tests.support.generation import assert_nothing_is_used, assert_same_run, greedy
from tests.support.grids import plain_only
from tests.support.zoo import small_model

# Where a kernel computes attention, float32 sums have another order, carried through random layers.
TOLERANCE = 1e-4
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(300)]


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model("qwen3")


def block_bytes(model: Any) -> int:
    """Bytes of 256 tokens in all layers."""
    factory = PagedCacheFactory(model, max_bytes=1 << 30)
    factory.can_admit(1)
    size: int = factory.pool.groups[0].allocator.formats[0].block_bytes
    return size


def test_make_cache_replaces_what_has_keys_and_values() -> None:
    kinds = {
        name: {type(cache).__name__ for cache in PagedCacheFactory(small_model(name)).make_cache()}
        for name in ("qwen3", "gemma3_text", "qwen3_next", "mamba")
    }
    assert kinds["qwen3"] == kinds["gemma3_text"] == {"PagedKVCache"}
    assert kinds["qwen3_next"] == {"PagedKVCache", "ArraysCache"}
    assert "PagedKVCache" not in kinds["mamba"]


def test_a_write_chunk_that_is_no_part_of_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must lie in \[1, 32\], the window, got 33"):
        PagedCacheFactory(small_model("gemma3_text"), write_chunk=33)


def test_all_layers_of_a_cache_are_one_sequence(model: Any) -> None:
    first, *rest = PagedCacheFactory(model).make_cache()
    assert all(cache.sequences == first.sequences for cache in rest)
    assert [cache.layer for cache in (first, *rest)] == list(range(len(rest) + 1))


def test_a_budget_that_is_too_small_raises_and_changes_nothing(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=2 * block_bytes(model))
    cache = factory.make_cache()
    run = greedy(model, PROMPT, cache, 2)
    before = factory.stats()
    with pytest.raises(PoolExhausted, match="raise max_bytes") as error:
        model(mx.array([PROMPT]), cache=cache)
    expected = {"needed": 1, "free": 0, "evictable": 0, "budget": 2 * block_bytes(model)}
    assert {name: getattr(error.value, name) for name in expected} == expected
    assert {layer.offset for layer in cache} == {len(PROMPT) + 2}
    after = factory.stats()
    assert (after.blocks_used, after.bytes_mapped) == (before.blocks_used, before.bytes_mapped)
    # Generation goes on with what fits, as if nothing had happened.
    stock = make_prompt_cache(model)
    greedy(model, PROMPT, stock, 2)
    assert_same_run(
        greedy(model, run.tokens, cache, 4), greedy(model, run.tokens, stock, 4), TOLERANCE
    )


def test_generation_goes_on_after_memory_is_freed(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=3 * block_bytes(model))
    first, second = factory.make_cache(), factory.make_cache()
    greedy(model, PROMPT, first, 1)
    with pytest.raises(PoolExhausted):
        greedy(model, PROMPT, second, 1)
    # The prompt that did not fit left nothing behind from its first step.
    assert {layer.offset for layer in second} == {0}
    del first
    stock = greedy(model, PROMPT, make_prompt_cache(model), 4)
    assert_same_run(greedy(model, PROMPT, second, 4), stock, TOLERANCE)
    del second
    assert_nothing_is_used(factory)


def test_can_admit_counts_whole_blocks_that_are_or_can_be_had(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=3 * block_bytes(model))
    assert [factory.can_admit(tokens) for tokens in (0, 1, 768, 769)] == [True, True, True, False]
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 1)
    assert [factory.can_admit(tokens) for tokens in (256, 257)] == [True, False]
    del cache
    assert factory.can_admit(768)


def test_no_block_is_lost_when_a_model_fails_between_its_layers(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 24)
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 1)
    later = cache[-1]

    class Failing:
        def __getattr__(self, name: str) -> Any:
            raise MemoryError("in the last layer")

    with pytest.raises(MemoryError):
        model(mx.array([PROMPT]), cache=[*cache[:-1], Failing()])
    del cache, later
    assert_nothing_is_used(factory)


def test_a_generator_that_is_not_finished_frees_its_blocks(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 24)
    steps = generate_step(mx.array(PROMPT), model, prompt_cache=factory.make_cache())
    next(steps)
    assert factory.stats().blocks_used == 2
    steps.close()
    del steps
    assert_nothing_is_used(factory)


def test_what_a_thread_left_uncomputed_does_not_hinder_others(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 24)
    thread = Thread(target=lambda: model(mx.array([PROMPT]), cache=factory.make_cache()))
    thread.start()
    thread.join()
    stock = greedy(model, PROMPT, make_prompt_cache(model), 4)
    assert_same_run(greedy(model, PROMPT, factory.make_cache(), 4), stock, TOLERANCE)


def test_nothing_is_computed_to_learn_how_large_blocks_are(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 24)
    assert factory.can_admit(1)
    assert (factory.stats().slabs, factory.stats().gather_fallbacks) == (0, 0)
    expected = block_bytes(model)
    cache = factory.make_cache()
    greedy(model, PROMPT[:3], cache, 1)
    assert factory.pool.groups[0].allocator.formats[0].block_bytes == expected
    assert sum(layer.nbytes for layer in cache) == expected


def test_no_slab_is_larger_than_a_buffer_may_be(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = 2 * 2 * 256 * 32 * 4
    monkeypatch.setattr("paged_kv.pool.layer_group.MAX_SLAB_BYTES", 3 * page_bytes)
    factory = PagedCacheFactory(model, max_bytes=1 << 28)
    cache = factory.make_cache()
    greedy(model, PROMPT * 9, cache, 1)
    slabs = [
        slab for pages in factory.pool.groups[0].pages.values() for slab in pages.slabs.values()
    ]
    assert max(slab.memory.nbytes for slab in slabs) == 3 * page_bytes


def test_clear_gives_back_what_no_sequence_uses(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    cache = factory.make_cache()
    greedy(model, PROMPT * 4, cache, 1)
    kept = factory.make_cache()
    greedy(model, PROMPT[:5], kept, 1)
    del cache
    gc.collect()
    factory.clear()
    stats = factory.stats()
    assert (stats.blocks_used, stats.slabs) == (1, 1)
    greedy(model, PROMPT[:5], kept, 1)
    del kept
    gc.collect()
    factory.clear()
    assert (factory.stats().bytes_mapped, factory.stats().slabs) == (0, 0)


def test_a_closed_factory_makes_no_caches_and_those_it_made_go_on(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 24)
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 1)
    factory.close()
    factory.close()
    with pytest.raises(RuntimeError, match=r"closed: make a new PagedCacheFactory\(model\)"):
        factory.make_cache()
    greedy(model, PROMPT[:5], cache, 1)
    del cache
    assert_nothing_is_used(factory)


def test_default_budget_is_reported(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="paged_kv"):
        factory = PagedCacheFactory(model)
    assert f"up to {format_size(factory.stats().bytes_budget)} of pages" in caplog.text


def test_stats_are_a_dictionary_too(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 24)
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 1)
    stats = factory.stats()
    content = stats.as_dict()
    (group,) = content.pop("groups")
    assert content == {name: getattr(stats, name) for name in content}
    assert (group["layers"], group["formats"][0]["used"]) == (len(cache), 2)
    assert PoolStats.from_dict(json.loads(json.dumps(stats.as_dict()))) == stats
    assert (stats.blocks_used, stats.gather_fallbacks) == (2, 0)
    assert stats.bytes_active == 2 * block_bytes(model) <= stats.bytes_mapped
    assert stats.bytes_active == sum(layer.nbytes for layer in cache)


def test_other_caches_are_not_affected_by_the_hook(model: Any) -> None:
    before = greedy(model, PROMPT, [KVCache() for _ in model.layers], 3)
    PagedCacheFactory(model).make_cache()
    after = greedy(model, PROMPT, [KVCache() for _ in model.layers], 3)
    rotating = greedy(model, PROMPT, [RotatingKVCache(64) for _ in model.layers], 3)
    assert_same_run(after, before, 0.0)
    assert rotating.tokens


CONTINUE_ELSEWHERE = """
import sys
from mlx_lm.models.cache import load_prompt_cache
from paged_kv import PagedCacheFactory
from tests.support.generation import greedy
from tests.support.zoo import small_model

model = small_model(sys.argv[1])
factory = PagedCacheFactory(model, max_bytes=1 << 26)
cache = load_prompt_cache(sys.argv[2])
print(greedy(model, [5, 6, 7], cache, 8).tokens)
print(factory.stats().blocks_used, sorted({type(layer).__name__ for layer in cache}))
"""


SAVED = ["llama", "gemma3_text", "qwen3_next", "deepseek_v32"]


@pytest.mark.parametrize("name", plain_only(["gemma3_text"], SAVED))
def test_a_saved_cache_goes_on_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 1)
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, cache)
    kinds = sorted({type(layer).__name__ for layer in cache})
    used = factory.stats().blocks_used
    continued = greedy(model, [5, 6, 7], cache, 8).tokens
    command = [sys.executable, "-c", CONTINUE_ELSEWHERE, name, file]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [str(continued), f"{used} {kinds}"]


def test_a_file_of_another_version_is_refused(model: Any) -> None:
    cache = PagedCacheFactory(model).make_cache()
    greedy(model, PROMPT[:5], cache, 1)
    state = {**cache[0].state, "version": 99}
    with pytest.raises(ValueError, match=r"format version 99, and this paged_kv reads 4"):
        PagedKVCache.from_state(state)
    with pytest.raises(ValueError, match="format version None"):
        PagedKVCache.from_state({})


def test_a_cache_class_that_nobody_knows_is_named() -> None:
    """What it holds would be lost: no pages, no prefixes, and no error."""

    class OwnCache(KVCache):
        pass

    model = small_model("llama")
    own: Any = OwnCache
    model.make_cache = lambda: [own()]
    with pytest.raises(TypeError, match=r"mlx-lm keeps a tests\..*OwnCache for a layer"):
        PagedCacheFactory(model, max_bytes=1 << 20)


def test_a_budget_that_holds_no_page_is_refused_before_anything_is_written(
    model_and_tokenizer: Any,
) -> None:
    # 256 tokens of 6 layers with 2 x 2 heads of 64 float32 numbers.
    least = 256 * 6 * 4 * 64 * 4
    for use in ("make_cache", "fetch_cache", "can_admit"):
        factory = PagedCacheFactory(model_and_tokenizer[0], max_bytes=least - 1)
        arguments = {"make_cache": (), "fetch_cache": ([1, 2],), "can_admit": (0,)}[use]
        for _ in range(2):
            with pytest.raises(PoolExhausted, match=f"raise max_bytes to at least {least:,}"):
                getattr(factory, use)(*arguments)
    PagedCacheFactory(model_and_tokenizer[0], max_bytes=least).make_cache()
