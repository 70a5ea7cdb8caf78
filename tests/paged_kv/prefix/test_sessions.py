"""Forgotten prompts and ended sessions give up their pages and states, and cost only time."""

from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, UnknownSession
from tests.support.generation import Run, assert_same_run, greedy
from tests.support.stored_prompts import TEXT, shallow_model

TOLERANCE = 1e-3
# They part within the second page.
ONE, OTHER = [*TEXT[:300], *TEXT[500:900]], [*TEXT[:300], *TEXT[400:700]]


def asked(
    model: Any, factory: PagedCacheFactory, prompt: list[int], **options: Any
) -> tuple[Run, int]:
    """The answer to a prompt, which is cached, and how much of the prompt was."""
    salt = options.get("salt")
    cache, cached = factory.fetch_cache(prompt, salt=salt)
    if cached < 300 and model.model_type in ("falcon_h1", "mamba"):
        # As the server does, so that recurrent layers can resume where prompts part.
        model(mx.array([prompt[cached:300]]), cache=cache)
        factory.insert_cache(prompt[:300], cache, **options)
        run = greedy(model, prompt[300:], cache, 4)
    else:
        run = greedy(model, prompt[cached:], cache, 4)
    factory.insert_cache(prompt + run.tokens, cache, **options)
    del cache
    factory.pool.check()
    return run, cached


@pytest.mark.parametrize("name", ["qwen3", "falcon_h1", "gpt_oss", "mamba"])
@pytest.mark.slow
def test_the_end_of_a_session_keeps_what_others_share(name: str) -> None:
    model = shallow_model(name)
    factory = PagedCacheFactory(model)
    first, _ = asked(model, factory, ONE, session="a")
    used = factory.stats(), factory.prefixes.snapshots.nbytes
    second, cached = asked(model, factory, OTHER, session="b")
    assert cached == 300
    assert factory.end_session("a") >= 2
    assert factory.stats().evictions["forgotten"] >= 2
    # What was computed again is the same, and what was shared is still there.
    assert factory.fetch_cache([*OTHER, *second.tokens, 1])[1] >= len(OTHER)
    again, cached = asked(model, factory, OTHER)
    assert cached >= 300
    assert_same_run(again, second, TOLERANCE)
    again, cached = asked(model, factory, ONE, session="a")
    assert cached <= 300
    assert_same_run(again, first, TOLERANCE)
    for session in "ba":
        factory.end_session(session)
    assert factory.forget(OTHER + second.tokens) > 0
    stats = factory.stats()
    assert (stats.blocks_used, stats.blocks_cached) == (0, 0)
    assert factory.prefixes.snapshots.nbytes == 0
    assert used[0].blocks_cached or used[1]
    with pytest.raises(UnknownSession):
        factory.end_session("a")


def test_names_and_tokens_are_checked() -> None:
    factory = PagedCacheFactory(shallow_model("qwen3"))
    unhashable: Any = []
    with pytest.raises(TypeError, match="session"):
        factory.end_session(unhashable)
    with pytest.raises(TypeError, match="session"):
        factory.insert_cache([1], factory.make_cache(), session=unhashable)
    with pytest.raises(TypeError, match="salt"):
        factory.forget([1], salt=unhashable)
    assert factory.forget([]) == 0
    with pytest.raises(UnknownSession):
        factory.end_session(None)
