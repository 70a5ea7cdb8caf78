"""A prompt cache of a model with recurrent layers is found up to its prompt's end, also after its
answer."""

import copy
import logging
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from paged_kv import PagedCacheFactory
from tests.support.generation import assert_same_run, greedy
from tests.support.stored_prompts import TEXT, shallow_model

TOLERANCE = 1e-4
PROMPTS = [TEXT[:300], TEXT[400:530]]


@pytest.fixture(params=["falcon_h1", "mamba2"])
def model(request: pytest.FixtureRequest) -> Any:
    return shallow_model(request.param)


def assert_found(model: Any, factory: PagedCacheFactory, prompt: list[int], end: int) -> None:
    """The next turn resumes at the end, and says the same."""
    turn = [*prompt, *TEXT[900:920]]
    expected = greedy(model, turn, factory.make_cache(), 4)
    cache, cached = factory.fetch_cache(turn)
    assert cached == end
    assert_same_run(greedy(model, turn[cached:], cache, 4), expected, TOLERANCE)


def test_the_next_turn_resumes_at_the_prompts_end(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    prompt, cached = PROMPTS[0], 0
    for _ in range(3):
        cache, found = factory.fetch_cache(prompt)
        assert found == cached
        run = greedy(model, prompt[found:], cache, 8, step=128)
        cached = factory.insert_cache(prompt, copy.deepcopy(cache))
        assert cached == len(prompt) - 1
        prompt = [*prompt, *run.tokens, *TEXT[700:750]]


def test_sequences_of_a_batch_remember_their_own(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    with factory:
        generator = BatchGenerator(model, max_tokens=6, prefill_step_size=100)
        uids = generator.insert(PROMPTS)
        caches: dict[int, Any] = {}
        while responses := generator.next_generated():
            caches |= {each.uid: each.prompt_cache for each in responses if each.prompt_cache}
    for uid, prompt in zip(uids, PROMPTS, strict=True):
        kept = factory.insert_cache(prompt, caches[uid])
        assert kept >= len(prompt) - 101
        assert_found(model, factory, prompt, kept)


def test_what_has_no_room_is_not_remembered_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = shallow_model("falcon_h1")
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    factory.prefixes.snapshots.max_bytes = 1
    cache = factory.make_cache()
    greedy(model, PROMPTS[0], cache, 4)
    with caplog.at_level(logging.WARNING):
        assert factory.insert_cache(PROMPTS[0], cache) == 0
    assert "insert_cache keeps nothing of 300 tokens" in caplog.text


def test_tokens_that_were_taken_back_are_not_remembered() -> None:
    """Nor those of a step of several tokens behind the prompt, as drafts take."""
    model = shallow_model("falcon_h1")
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    prompt = PROMPTS[0]
    cache, _ = factory.fetch_cache(prompt)
    for tokens in (prompt, TEXT[500:520]):
        model(mx.array([tokens]), cache=cache)
    assert factory.insert_cache(prompt, cache) == len(prompt)
    assert_found(model, factory, prompt, len(prompt))
