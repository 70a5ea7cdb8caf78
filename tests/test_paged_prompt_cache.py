"""The interface of mlx-lm's LRUPromptCache, on pages."""

from types import SimpleNamespace
from typing import Any

import pytest

from paged_kv import PagedCacheFactory
from paged_kv.integrations.paged_prompt_cache import PagedPromptCache
from tests.generation import assert_same_run, greedy
from tests.zoo import small_model

KEY = ("path", None, None)
TEXT = [(11 * i * i + 5 * i + 7) % 97 for i in range(900)]


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return small_model("qwen3")


@pytest.fixture(scope="module")
def gemma3() -> Any:
    """With windows of 32 tokens."""
    return small_model("gemma3_text")


def prompts_of(*models: Any, **limits: int) -> tuple[PagedPromptCache, list[PagedCacheFactory]]:
    factories = [PagedCacheFactory(model, max_bytes=64 << 20) for model in models]
    loaded: Any = SimpleNamespace(model_key=KEY, factories=factories)
    return PagedPromptCache(loaded, **limits), factories


def keep(
    prompts: PagedPromptCache,
    models: list[Any],
    factories: list[PagedCacheFactory],
    tokens: list[int],
    most: list[int] | None = None,
) -> None:
    """Compute a prompt with every model, of some only the first tokens, and keep it."""
    prompt_cache: list[Any] = []
    for model, factory, end in zip(models, factories, most or [len(tokens)] * 2, strict=False):
        cache = factory.make_cache()
        greedy(model, tokens[:end], cache, 1)
        for layer in cache:
            layer.trim(layer.offset - end)  # what was generated
        prompt_cache += cache
    # Nothing but the list holds them, as in the server.
    del cache, layer
    prompts.insert_cache(KEY, tokens, prompt_cache, cache_type="user")
    assert prompt_cache == []


def test_what_was_kept_is_found_and_at_least_one_token_is_left(qwen3: Any) -> None:
    prompts, factories = prompts_of(qwen3)
    assert prompts.fetch_nearest_cache(KEY, TEXT[:300]) == (None, TEXT[:300])
    keep(prompts, [qwen3], factories, TEXT[:300])
    assert len(prompts) == 1
    for asked, cached in ((TEXT[:300], 299), (TEXT[:400], 300), ([*TEXT[:100], 1, 2], 100)):
        found, rest = prompts.fetch_nearest_cache(KEY, asked)
        assert rest == asked[cached:]
        expected = greedy(qwen3, asked, factories[0].make_cache(), 4)
        assert_same_run(greedy(qwen3, rest, found, 4), expected, 1e-4)
    assert prompts.fetch_nearest_cache(KEY, TEXT[:1]) == (None, TEXT[:1])
    assert prompts.fetch_nearest_cache(KEY, []) == (None, [])


def test_another_model_finds_and_keeps_nothing(qwen3: Any) -> None:
    prompts, factories = prompts_of(qwen3)
    keep(prompts, [qwen3], factories, TEXT[:300])
    assert prompts.fetch_nearest_cache("other", TEXT[:300]) == (None, TEXT[:300])
    cache = factories[0].make_cache()
    greedy(qwen3, TEXT[500:600], cache, 1)
    prompts.insert_cache("other", TEXT[500:600], cache)
    assert len(prompts) == 1


def test_a_draft_model_goes_on_behind_the_same_token(qwen3: Any, gemma3: Any) -> None:
    models = [qwen3, gemma3]
    prompts, factories = prompts_of(*models)
    keep(prompts, models, factories, TEXT[:300], most=[300, 290])
    found, rest = prompts.fetch_nearest_cache(KEY, TEXT[:400])
    assert found is not None
    assert rest == TEXT[290:400]
    assert {cache.offset for cache in found} == {290}
    count = len(factories[0].make_cache())
    for model, factory, cache in zip(
        models, factories, (found[:count], found[count:]), strict=True
    ):
        expected = greedy(model, TEXT[:400], factory.make_cache(), 4)
        assert_same_run(greedy(model, rest, cache, 4), expected, 1e-3)


def page_bytes(factory: PagedCacheFactory) -> int:
    """Bytes of all pages that are not free."""
    stats = factory.stats()
    return stats.bytes_active + stats.bytes_retained


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_bytes_are_those_that_no_request_uses(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    prompts, (factory,) = prompts_of(model)
    assert prompts.nbytes == 0
    keep(prompts, [model], [factory], TEXT[:600])
    kept = prompts.nbytes
    assert kept == page_bytes(factory) > 0
    assert prompts.stats_by_type() == {"pages": {"n_sequences": 1, "n_bytes": kept}}
    found, _ = prompts.fetch_nearest_cache(KEY, TEXT[:700])
    assert prompts.nbytes < kept
    # What is in use stays, and cannot be evicted.
    prompts.trim_to(n_bytes=-1)
    assert page_bytes(factory) > 0
    del found
    prompts.trim_to(n_bytes=kept // 2)
    assert 0 < prompts.nbytes <= kept // 2
    prompts.trim_to(n_sequences=0)
    assert (len(prompts), prompts.nbytes, page_bytes(factory)) == (0, 0, 0)
    factory.pool.check()


def test_the_prompts_used_last_are_kept(qwen3: Any) -> None:
    prompts, factories = prompts_of(qwen3, max_size=2)
    for first in range(3):
        keep(prompts, [qwen3], factories, [first, *TEXT[:300]])
    assert len(prompts) == 2
    found = [prompts.fetch_nearest_cache(KEY, [first, *TEXT[:300]])[0] for first in range(3)]
    assert [cache is not None for cache in found] == [False, True, True]
    del found
    one_prompt = prompts.nbytes // 2
    limited, factories = prompts_of(qwen3, max_bytes=one_prompt)
    for first in range(3):
        keep(limited, [qwen3], factories, [first, *TEXT[:300]])
    assert limited.nbytes == one_prompt
    assert limited.fetch_nearest_cache(KEY, [2, *TEXT[:300]])[0] is not None


def test_a_model_without_pages_keeps_nothing() -> None:
    model = small_model("mamba")
    prompts, factories = prompts_of(model)
    cache = factories[0].make_cache()
    prompts.insert_cache(KEY, TEXT[:10], cache)
    assert prompts.fetch_nearest_cache(KEY, TEXT[:20]) == (None, TEXT[:20])
    prompts.trim_to(n_sequences=0, n_bytes=0)
    assert (len(prompts), prompts.nbytes) == (0, 0)
