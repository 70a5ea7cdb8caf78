"""Layers that attend by chunks (llama4): tokens are mlx-lm's; a ring holds one chunk's length."""

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from paged_kv import PagedCacheFactory
from paged_kv.cache.chunked_kv_cache import PagedChunkedKVCache
from tests.support.generation import (
    assert_nothing_is_used,
    assert_same_run,
    assert_same_runs,
    greedy,
)
from tests.support.zoo import small_model

TOLERANCE = 1e-4
CHUNK = 32  # of the zoo's llama4
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(600)]


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model("llama4")


def gathers(factory: PagedCacheFactory) -> int:
    gc.collect()
    return factory.stats().gather_fallbacks


@pytest.mark.parametrize(
    ("length", "step"), [(5, 7), (CHUNK - 1, 64), (CHUNK, 7), (CHUNK + 1, 64), (3 * CHUNK, 64)]
)
@pytest.mark.slow
def test_prompts_that_end_anywhere_in_a_chunk(
    model: Any, backend: str, length: int, step: int
) -> None:
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    ours = greedy(model, PROMPT[:length], factory.make_cache(), 3, step)
    assert_same_run(
        ours, greedy(model, PROMPT[:length], make_prompt_cache(model), 3, step), TOLERANCE
    )
    assert_nothing_is_used(factory)


def test_decode_over_the_end_of_a_chunk_gathers_nothing(model: Any, backend: str) -> None:
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    cache, stock = factory.make_cache(), make_prompt_cache(model)
    for each in (cache, stock):
        mx.eval(model(mx.array([PROMPT[:52]]), cache=each))
    before = gathers(factory)
    for token in PROMPT[:16]:
        ours, theirs = (model(mx.array([[token]]), cache=each) for each in (cache, stock))
        assert mx.abs(ours - theirs).max() < TOLERANCE
    del ours
    assert gathers(factory) == before


def test_trims_forks_and_saved_caches(model: Any, tmp_path: Path) -> None:
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    caches = [factory.make_cache(), make_prompt_cache(model)]
    for cache in caches:
        greedy(model, PROMPT[:45], cache, 1)
        assert trim_prompt_cache(cache, 9)
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, caches[0])
    loaded: Any = load_prompt_cache(file)
    assert isinstance(loaded[0], PagedChunkedKVCache)
    ours, theirs = (greedy(model, PROMPT[:40], cache, 5) for cache in caches)
    assert_same_runs([ours, greedy(model, PROMPT[:40], loaded, 5)], [theirs] * 2, TOLERANCE)


def test_a_batch_with_a_mask_of_its_own_is_refused(model: Any) -> None:
    """The model makes one mask; its call takes the sequences one after the other."""
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    caches = [factory.make_cache(), factory.make_cache()]
    batch = [first.merge([first, second]) for first, second in zip(*caches, strict=True)]
    with pytest.raises(ValueError, match="takes one sequence, this cache has 2"):
        assert batch[0].start_position
    with pytest.raises(ValueError, match="takes one sequence, this cache has 0"):
        assert PagedChunkedKVCache(factory.pool, 0, []).start_position


def test_a_mask_of_one_token_with_gaps_gathers(model: Any, backend: str) -> None:
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    cache, stock = factory.make_cache(), make_prompt_cache(model)
    for each in (cache, stock):
        mx.eval(model(mx.array([PROMPT[:9]]), cache=each))
    attention = model.layers[0].self_attn
    step = mx.random.normal((1, 1, 64), key=mx.random.key(1))
    for name, mask in (("gaps", mx.arange(10) % 3 > 0), ("all", mx.arange(10) < 0)):
        before = gathers(factory)
        ours, theirs = (attention(step, mask, cache=each[0]) for each in (cache, stock))
        if name == "gaps":
            assert mx.abs(ours - theirs).max() < TOLERANCE
        del ours
        assert gathers(factory) == before + 1
        for each in (cache, stock):
            each[0].trim(1)
