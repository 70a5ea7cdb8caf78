"""mlx-lm's LRUPromptCache respects how far a window can be rolled back."""

from typing import Any

import pytest
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from paged_kv import PagedCacheFactory, RollbackError
from tests.support.generation import assert_nothing_is_used, assert_same_run, greedy
from tests.support.zoo import small_model

TOKENS = [(7 * i * i + 3 * i + 1) % 97 for i in range(400)]
KEY = "model"


@pytest.fixture(scope="module")
def model() -> Any:
    """A model with windows of 32 tokens, whose rings of one page hold 256."""
    return small_model("gemma3_text")


def filled(model: Any, factory: PagedCacheFactory, tokens: list[int]) -> list[Any]:
    cache = factory.make_cache()
    # The cache's prompt lacks the last generated token, so it is trimmed.
    greedy(model, tokens, cache, 1, 64)
    for layer in cache:
        layer.trim(1)
    return cache


def test_what_can_be_trimmed_is_found_and_goes_on_as_if_computed(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    with factory:
        prompts = LRUPromptCache()
        prompts.insert_cache(KEY, TOKENS, filled(model, factory, TOKENS))
        asked = [*TOKENS[:300], 5, 6, 7]
        found, rest = prompts.fetch_nearest_cache(KEY, asked)
    assert rest == [5, 6, 7]
    expected = greedy(model, asked, make_prompt_cache(model), 6, 64)
    assert_same_run(greedy(model, rest, found, 6), expected, 1e-3)
    del prompts, found
    assert_nothing_is_used(factory)


def test_what_cannot_be_trimmed_is_a_miss_or_a_shorter_match(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    with factory:
        prompts = LRUPromptCache()
        prompts.insert_cache(KEY, TOKENS, filled(model, factory, TOKENS))
        asked = [*TOKENS[:100], 5, 6]
        assert prompts.fetch_nearest_cache(KEY, asked) == (None, asked)
        prompts.insert_cache(KEY, TOKENS[:40], filled(model, factory, TOKENS[:40]))
        found, rest = prompts.fetch_nearest_cache(KEY, asked)
        assert (found[0].size(), rest) == (40, asked[40:])
    with pytest.raises(RollbackError):
        prompts.fetch_nearest_cache(KEY, asked)


def test_other_caches_are_found_as_ever(model: Any) -> None:
    stock = make_prompt_cache(model)
    greedy(model, TOKENS[:20], stock, 1)
    with PagedCacheFactory(small_model("qwen3")):
        prompts = LRUPromptCache()
        prompts.insert_cache(KEY, TOKENS[:20], stock)
        found, rest = prompts.fetch_nearest_cache(KEY, TOKENS[:30])
        assert (found[0].offset, rest) == (stock[0].offset, TOKENS[20:30])
        assert prompts.fetch_nearest_cache(KEY, [90, 91]) == (None, [90, 91])
