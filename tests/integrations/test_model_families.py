"""One small random model of each family with special demands on a cache."""

import copy
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import (
    CacheList,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from paged_kv import PagedCacheFactory, PagedKVCache
from tests.support.generation import assert_same_run, greedy
from tests.support.grids import plain_only
from tests.support.zoo import FAMILIES, small_model

# Where a kernel computes attention, float32 sums have another order, carried through random layers.
TOLERANCE = 1e-4
# These compute attention themselves, or on keys and values that they transform first.
GATHERING = {"deepseek_v3", "minimax_m3_vl"}
# With a softcap, with windows, with shared keys, with latents, recurrent, with experts, and none of
# these.
PLAIN = ["llama", "gemma2", "gemma3_text", "gemma3n", "deepseek_v3", "qwen3_next", "gpt_oss"]
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(270)]


def windows_of(cache: Any) -> set[bool]:
    """The kinds of paged layers in a cache: with a window, without, or both."""
    kinds = set()
    for layer in cache:
        inner = layer.caches[0] if isinstance(layer, CacheList) else layer
        if isinstance(inner, PagedKVCache):
            kinds.add(inner.layer in inner.pool.windows)
    return kinds


def blocks_of_a_sequence(cache: Any) -> int:
    """The blocks of 257 to 512 tokens: two in layers without a window, and a ring of one for
    windows of 32."""
    return sum(1 if has_window else 2 for has_window in windows_of(cache))


@pytest.fixture(scope="module", params=plain_only(PLAIN, FAMILIES))
def family(request: pytest.FixtureRequest) -> Any:
    return request.param, small_model(request.param)


def test_same_tokens(family: Any) -> None:
    name, model = family
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    cache = factory.make_cache()
    stock = greedy(model, PROMPT, make_prompt_cache(model), 16, 60)
    assert_same_run(greedy(model, PROMPT, cache, 16, 60), stock, TOLERANCE)
    assert (factory.stats().gather_fallbacks > 0) == (name in GATHERING)
    assert factory.stats().blocks_used == blocks_of_a_sequence(cache)
    del cache
    factory.pool.check()
    assert factory.stats().blocks_used == 0


def test_same_tokens_after_trim(family: Any) -> None:
    _, model = family
    factory = PagedCacheFactory(model)
    runs = []
    for cache in (make_prompt_cache(model), factory.make_cache()):
        # Shorter than the smallest window: a rotating cache trims only before it wraps.
        greedy(model, PROMPT[:20], cache, 4)
        if not can_trim_prompt_cache(cache):
            return
        # One declares a list, and one a number.
        trimmed: Any = trim_prompt_cache(cache, 9)
        assert trimmed == 9
        runs.append(greedy(model, PROMPT[50:58], cache, 8))
        trim_prompt_cache(cache, 1000)
        runs.append(greedy(model, PROMPT[:20], cache, 4))
    assert_same_run(runs[2], runs[0], TOLERANCE)
    assert_same_run(runs[3], runs[1], TOLERANCE)


def test_both_copies_continue_differently_after_deepcopy(family: Any) -> None:
    _, model = family
    factory = PagedCacheFactory(model)
    runs = []
    for original in (make_prompt_cache(model), factory.make_cache()):
        greedy(model, PROMPT[:260], original, 1, 60)
        fork = copy.deepcopy(original)
        second = copy.deepcopy(fork)
        runs.append(greedy(model, PROMPT[5:9], original, 8))
        runs.append(greedy(model, PROMPT[30:34], fork, 8))
        runs.append(greedy(model, PROMPT[60:64], second, 8))
    for ours, stock in zip(runs[3:], runs[:3], strict=True):
        assert_same_run(ours, stock, TOLERANCE)
    # All three share a full block once. Each has a last block, and a ring, of its own.
    expected = sum(3 if has_window else 4 for has_window in windows_of(original))
    assert factory.stats().blocks_used == expected
    del original, fork, second
    factory.pool.check()
    assert factory.stats().blocks_used == 0


def test_same_tokens_after_save_and_load(family: Any, tmp_path: Path) -> None:
    _, model = family
    factory = PagedCacheFactory(model)
    cache = factory.make_cache()
    greedy(model, PROMPT[:260], cache, 1, 60)
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, cache)
    loaded, again = load_prompt_cache(file), load_prompt_cache(file)
    continued = greedy(model, PROMPT[:4], cache, 8)
    assert_same_run(greedy(model, PROMPT[:4], loaded, 8), continued, TOLERANCE)
    assert_same_run(greedy(model, PROMPT[:4], again, 8), continued, TOLERANCE)
    assert factory.stats().blocks_used == 3 * blocks_of_a_sequence(cache)
    del cache, loaded, again
    factory.pool.check()
    assert factory.stats().blocks_used == 0


def test_can_admit_before_the_first_write(family: Any) -> None:
    _, model = family
    factory = PagedCacheFactory(model, max_bytes=4 << 20)
    assert factory.can_admit(256)
    assert not factory.can_admit(256 << 20)
    assert factory.stats().blocks_used == 0
    run = greedy(model, PROMPT[:40], factory.make_cache(), 4)
    assert_same_run(run, greedy(model, PROMPT[:40], make_prompt_cache(model), 4), TOLERANCE)
