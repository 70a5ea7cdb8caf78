"""Layers that attend by chunks (llama4): tokens are mlx-lm's; a ring holds one chunk's length."""

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    make_prompt_cache,
)

from paged_kv import PagedCacheFactory
from tests.support.generation import (
    assert_nothing_is_used,
    assert_same_run,
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
