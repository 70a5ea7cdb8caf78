"""Reusable prefixes of prompts."""

from typing import Any

import pytest

from paged_kv import PagedCacheFactory
from paged_kv.server.engine.prompt_fetcher import PromptReuse
from tests.support.generation import assert_same_run, greedy
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
    cache, cached = prompts.fetch(tokens, salt)
    return cache, tokens[cached:]


def kept_bytes(factories: list[PagedCacheFactory]) -> int:
    return sum(factory.stats().bytes_retained for factory in factories)


def test_what_was_kept_is_found_and_at_least_one_token_is_left(qwen3: Any) -> None:
    prompts, factories = prompts_of(qwen3)
    assert_unknown(prompts, TEXT[:300])
    keep(prompts, qwen3, factories[0], TEXT[:300])
    for asked, cached in ((TEXT[:300], 299), (TEXT[:400], 300), ([*TEXT[:100], 1, 2], 100)):
        found, rest = fetched(prompts, asked)
        assert rest == asked[cached:]
        expected = greedy(qwen3, asked, factories[0].make_cache(), 4)
        assert_same_run(greedy(qwen3, rest, found, 4), expected, 1e-4)
    assert_unknown(prompts, TEXT[:1])
    assert_unknown(prompts, TEXT[:300], salt="bob")
    assert_unknown(prompts, TEXT[:300], salt=None)


def assert_unknown(prompts: PromptReuse, tokens: list[int], salt: str | None = SALT) -> None:
    found, rest = fetched(prompts, tokens, salt)
    assert all(layer.empty() for layer in found)
    assert rest == tokens


def test_the_prompts_used_last_are_kept(qwen3: Any) -> None:
    prompts, factories = prompts_of(qwen3, max_prompts=2)
    for first in range(3):
        keep(prompts, qwen3, factories[0], [first, *TEXT[:300]])
    found = [fetched(prompts, [first, *TEXT[:300]]) for first in range(3)]
    assert [len(rest) for _, rest in found] == [301, 1, 1]


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_bytes_are_bounded_those_of_requests_among_them(name: str) -> None:
    model = shallow_model(name)
    unbounded, factories = prompts_of(model)
    for first in range(3):
        keep(unbounded, model, factories[0], [first, *TEXT[:300]])
    one_prompt = kept_bytes(factories) // 3
    prompts, factories = prompts_of(model, max_bytes=2 * one_prompt)
    for first in range(3):
        keep(prompts, model, factories[0], [first, *TEXT[:300]])
    assert kept_bytes(factories) == 2 * one_prompt
    # Blocks that a request uses are active, not kept, but still count against the limit.
    found, rest = fetched(prompts, [2, *TEXT[:300]])
    assert len(rest) == 1
    for first in range(3, 6):
        keep(prompts, model, factories[0], [first, *TEXT[:300]])
        assert factories[0].stats().bytes_active > 0
        assert kept_bytes(factories) <= one_prompt
    del found
    factories[0].pool.check()


def test_a_model_without_pages_keeps_states() -> None:
    """They are found at the end of the tokens that they hold, and nowhere before it."""
    model = shallow_model("mamba")
    prompts, factories = prompts_of(model)
    cache = factories[0].make_cache()
    run = greedy(model, TEXT[:8], cache, 3)
    told = [*TEXT[:8], *run.tokens]
    prompts.insert(told[:9], [*cache], SALT)
    assert fetched(prompts, told)[1] == told
    prompts.insert(told, cache, SALT)
    assert cache == []
    assert fetched(prompts, [*told, 5])[1] == [5]
