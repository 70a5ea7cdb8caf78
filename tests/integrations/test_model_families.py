"""One small random model of each family with special demands on a cache."""

import copy
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import (
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from paged_kv import PagedCacheFactory
from tests.support.generation import (
    assert_nothing_is_used,
    assert_same_run,
    assert_same_runs,
    greedy,
)
from tests.support.grids import plain_only
from tests.support.zoo import FAMILIES, small_model

# Where a kernel computes attention, float32 sums have another order, carried through random layers.
TOLERANCE = 1e-4
# These compute attention themselves, or on keys and values that they transform first.
GATHERING = {"deepseek_v3", "minimax_m3_vl"}
# With windows, also with sinks, with latents, recurrent, and none of these.
PLAIN = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next"]
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(270)]


@pytest.fixture(scope="module", params=plain_only(PLAIN, FAMILIES))
def family(request: pytest.FixtureRequest) -> Any:
    return request.param, small_model(request.param)


def test_same_tokens(family: Any) -> None:
    name, model = family
    factory = PagedCacheFactory(model, max_bytes=8 << 20)
    assert factory.can_admit(256)
    assert not factory.can_admit(256 << 20)
    assert factory.stats().blocks_used == 0
    cache = factory.make_cache()
    stock = greedy(model, PROMPT, make_prompt_cache(model), 8, 90)
    assert_same_run(greedy(model, PROMPT, cache, 8, 90), stock, TOLERANCE)
    assert (factory.stats().gather_fallbacks > 0) == (name in GATHERING)
    assert factory.stats().blocks_used > 0
    del cache
    assert_nothing_is_used(factory)


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
        runs.append(greedy(model, PROMPT[50:58], cache, 4))
        trim_prompt_cache(cache, 1000)
        runs.append(greedy(model, PROMPT[:20], cache, 4))
    assert_same_runs(runs[2:], runs[:2], TOLERANCE)


@pytest.mark.slow
def test_copies_and_saved_caches_go_on(family: Any, tmp_path: Path) -> None:
    _, model = family
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    file, runs = str(tmp_path / "prompt.safetensors"), []
    for original in (make_prompt_cache(model), factory.make_cache()):
        greedy(model, PROMPT[:260], original, 1, 90)
        save_prompt_cache(file, original)
        caches = [original, copy.deepcopy(original), copy.deepcopy(original)]
        for at, cache in enumerate(caches):
            runs.append(greedy(model, PROMPT[25 * at :][:4], cache, 4))
    caches = [load_prompt_cache(file), load_prompt_cache(file)]
    runs += [greedy(model, PROMPT[:4], cache, 4) for cache in caches]
    assert_same_runs(runs[3:], [*runs[:3], runs[0], runs[0]], TOLERANCE)
    del original, cache, caches
    assert_nothing_is_used(factory)
