"""mlx-lm on quantised pages attends to the same numbers as on a contiguous cache of them."""

import copy
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.page_format import FormatName
from tests.support.followed_caches import FollowedCache, farthest, followed_caches
from tests.support.generation import (
    assert_nothing_is_used,
    assert_same_run,
    assert_written_and_free,
    greedy,
)
from tests.support.grids import plain_only
from tests.support.zoo import small_model

PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(430)]
NEW_TOKENS = 4


def new_factory(model: Any, page_format: FormatName) -> PagedCacheFactory:
    return PagedCacheFactory(model, page_format=page_format, max_bytes=64 << 20)


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
    factory = new_factory(model, page_format)
    distances: list[mx.array] = []
    cache = followed_caches(model, factory, page_format, distances)
    run = greedy(model, PROMPT, cache, NEW_TOKENS, step)
    assert farthest(distances) <= (1 if dtype == mx.float32 else 0)
    # Looking at the arrays changes nothing.
    assert_same_run(greedy(model, PROMPT, factory.make_cache(), NEW_TOKENS, step), run, 0.0)
    assert factory.stats().gather_fallbacks == 0
    del cache
    assert_written_and_free(factory)


@pytest.mark.parametrize("name", plain_only(["gemma3_text"], ["llama", "gemma3_text", "gpt_oss"]))
@pytest.mark.slow
def test_merged_rows_are_extended_filtered_and_extracted(name: str) -> None:
    """Every sequence decodes the same in one batch after the other as alone."""
    model: Any = small_model(name)
    factory = new_factory(model, "q4")
    distances: list[mx.array] = []
    rows = [PROMPT[:300], PROMPT[100:130], PROMPT[5:262]]
    caches = [followed_caches(model, factory, "q4", distances) for _ in rows]
    for row, cache in zip(rows, caches, strict=True):
        greedy(model, row, cache, 1, 32)

    def assert_step(layers: list[FollowedCache], tokens: list[int]) -> None:
        distances.clear()
        mx.eval(model(mx.array(tokens)[:, None], cache=layers), distances)
        assert len(distances) == 3 * len(layers) * len(tokens)
        assert farthest(distances) <= 1

    batch = [FollowedCache.merge(list(layers)) for layers in zip(*caches[:2], strict=True)]
    for layer, more in zip(batch, copy.deepcopy(caches[2]), strict=True):
        layer.extend(more)
    assert_step(batch, [3, 5, 7])
    for layer in batch:
        layer.filter([2, 0])
    assert_step(batch, [11, 13])
    alone = [layer.extract(1) for layer in batch]
    assert_step(alone, [17])
    assert_step(batch, [19, 19])
    # The merged caches are unchanged.
    assert_step(caches[1], [23])
    del caches, batch, alone, layer, more, cache
    assert_nothing_is_used(factory)


@pytest.mark.slow
@pytest.mark.parametrize("page_format", plain_only(["q4"], ["q4", ("q8", "q4")]), ids=str)
def test_rows_are_trimmed_and_written_again(page_format: FormatName) -> None:
    """Trim back into an earlier page, and within one: other slots of the page keep their
    contents."""
    model = small_model("qwen3")
    distances: list[mx.array] = []
    cache = followed_caches(model, new_factory(model, page_format), page_format, distances)
    greedy(model, [*PROMPT, *PROMPT[:90]], cache, 1)
    for back, more in ((300, 50), (10, 3), (1, 1), (40, 300)):
        assert [layer.trim(back) for layer in cache] == [back] * len(cache)
        greedy(model, PROMPT[100 : 100 + more], cache, 3)
        assert farthest(distances) <= 1
