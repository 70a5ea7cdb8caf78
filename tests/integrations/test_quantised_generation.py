"""mlx-lm on quantised pages attends to the same numbers as on a contiguous cache of them."""

from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.page_format import FormatName
from tests.support.followed_caches import farthest, followed_caches
from tests.support.generation import (
    assert_same_run,
    assert_written_and_free,
    greedy,
)
from tests.support.zoo import small_model

PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(430)]
NEW_TOKENS = 4


@pytest.mark.parametrize(
    ("name", "page_format", "dtype", "step"),
    [
        ("llama", "q4", mx.float32, 32),
        ("gemma3_text", "q8", mx.float32, 32),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                # Longer than a window: attended to before it is quantised.
                ("gemma3_text", "q4", mx.float32, 100),
                ("llama", "q8", mx.float16, 32),
                ("gemma3_text", "q4", mx.bfloat16, 32),
                # With sinks; MLX's CPU backend runs its experts in float32 only.
                ("gpt_oss", "q4", mx.float32, 32),
                # They cast and tile keys.
                ("stablelm", "q8", mx.float32, 32),
                ("plamo", "q4", mx.float32, 32),
            )
        ),
    ],
)
@pytest.mark.slow
def test_small_models_of_every_dtype(
    name: str, page_format: FormatName, dtype: mx.Dtype, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 32 tokens in rings of one page.

    In 16 bits the plain backend attends with MLX's own attention, so nothing may differ;
    tests/kernels/test_backend_formats.py compares the native one's.
    """
    if dtype != mx.float32:
        monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
    model: Any = small_model(name)
    model.set_dtype(dtype)
    factory = PagedCacheFactory(model, page_format=page_format, max_bytes=64 << 20)
    distances: list[mx.array] = []
    cache = followed_caches(model, factory, page_format, distances)
    run = greedy(model, PROMPT, cache, NEW_TOKENS, step)
    assert farthest(distances) <= (1 if dtype == mx.float32 else 0)
    # Looking at the arrays changes nothing.
    assert_same_run(greedy(model, PROMPT, factory.make_cache(), NEW_TOKENS, step), run, 0.0)
    assert factory.stats().gather_fallbacks == 0
    del cache
    assert_written_and_free(factory)
