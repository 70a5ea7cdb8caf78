"""Reusable prefixes of prompts."""

from typing import Any

import pytest

from paged_kv import PagedCacheFactory
from paged_kv.server.engine.prompt_fetcher import PromptReuse
from tests.support.generation import greedy
from tests.support.stored_prompts import TEXT, shallow_model

SALT = "alice"


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return shallow_model("qwen3")


def prompts_of(*models: Any, **limits: int) -> tuple[PromptReuse, list[PagedCacheFactory]]:
    factories = [PagedCacheFactory(model, max_bytes=64 << 20) for model in models]
    return PromptReuse(factories, **limits), factories


def keep(prompts: PromptReuse, model: Any, factory: PagedCacheFactory, tokens: list[int]) -> None:
    """Compute a prompt, and insert it."""
    prompt_cache = factory.make_cache()
    greedy(model, tokens, prompt_cache, 1)
    for layer in prompt_cache:
        layer.trim(layer.offset - len(tokens))  # The generated token.
    del layer  # Only the list holds them, as in the server.
    prompts.insert(tokens, prompt_cache, SALT)
    assert prompt_cache == []


def fetched(prompts: PromptReuse, tokens: list[int], salt: str | None = SALT) -> Any:
    """The number of cached tokens, and the tokens left to compute."""
    cache, cached = prompts._factories[0].fetch_cache(tokens, salt=salt)
    return cache, tokens[cached:]


def test_the_prompts_used_last_are_kept(qwen3: Any) -> None:
    prompts, factories = prompts_of(qwen3, max_prompts=2)
    for first in range(3):
        keep(prompts, qwen3, factories[0], [first, *TEXT[:300]])
    found = [fetched(prompts, [first, *TEXT[:300]]) for first in range(3)]
    assert [len(rest) for _, rest in found] == [301, 1, 1]
