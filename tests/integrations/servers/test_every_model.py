"""`use_pages` gives every model pages, and schedulers of other servers prompts in them."""

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from paged_kv import PagedCacheFactory, PagedKVCache, use_pages
from paged_kv.integrations.prompt_cache_hook import installed_factory
from paged_kv.integrations.servers.every_model import adapt
from paged_kv.kernels.pages.errors import warn_once
from tests.support.zoo import small_model

PROMPT = [(7 * at * at + 3 * at + 1) % 97 for at in range(300)]
TESTED = "server 0"


pytestmark = pytest.mark.usefixtures("pages_taken_back")


def answer(model: Any, prompt: list[int]) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=4)]


def test_models_have_pages_prompts_are_kept_and_all_goes_with_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model: Any = small_model("qwen3")
    expected = [answer(model, PROMPT), answer(model, [*PROMPT, 5])]
    use_pages(max_bytes="32MB")
    assert {type(each) for each in make_prompt_cache(model)} == {PagedKVCache}
    assert capsys.readouterr().err == "paged-kv: pages for qwen3: at most 32.00 MB\n"
    assert [answer(model, PROMPT), answer(model, [*PROMPT, 5])] == expected
    factory: Any = installed_factory(model)
    assert factory.fetch_cache([*PROMPT, 5])[1] == 300
    generator = BatchGenerator(model, max_tokens=4)
    with generator.stats() as stats:
        generator.insert([[*PROMPT, 5]])
        while generator.next_generated():
            pass
    assert stats.prompt_tokens == 0
    assert installed_factory(copy.deepcopy(model)) not in (factory, None)
    gone = weakref.ref(model)
    del model, factory, generator
    gc.collect()
    assert gone() is None


def test_a_model_that_cannot_have_pages_keeps_its_caches(caplog: pytest.LogCaptureFixture) -> None:
    class Unknown(KVCache):
        pass

    model: Any = small_model("qwen3")
    object.__setattr__(model, "make_cache", lambda: [Unknown() for _ in model.layers])  # type: ignore[no-untyped-call]
    use_pages(max_bytes="32MB")
    assert {type(each) for each in make_prompt_cache(model)} == {Unknown}
    assert answer(model, PROMPT)
    assert "Unknown" in caplog.text


def scheduler_kind(cache: Any, **others: Any) -> Any:
    """A class as that of the servers' schedulers."""

    class Scheduler:
        def __init__(self, model: Any, tokenizer: Any = None) -> None:
            self.memory_aware_cache = cache
            vars(self).update(others)

    return Scheduler


def test_a_scheduler_finds_and_keeps_prompts_in_pages(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = small_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes="32MB")
    cleared: list[Any] = []
    cache = SimpleNamespace(fetch=None, store=None, clear=cleared.append)
    kind = scheduler_kind(cache, _extract_cache_states=lambda prompt_cache: "copies")
    adapt(TESTED, lambda _: factory, SimpleNamespace(Scheduler=kind))
    scheduler = kind(model)
    assert "no other limit" in capsys.readouterr().err
    assert cache.fetch(PROMPT) == (None, PROMPT)
    prompt_cache = factory.make_cache()
    model(mx.array([PROMPT]), cache=prompt_cache)
    assert scheduler._extract_cache_states(prompt_cache) is prompt_cache
    assert scheduler._extract_cache_states([KVCache()]) == "copies"
    assert cache.store(PROMPT, prompt_cache, evict_prefixes=False)
    found, left = cache.fetch([*PROMPT, 5])
    assert (found[0].offset, left, cache._last_match_type) == (300, [5], "prefix")
    # What cannot be kept or found costs no request.
    assert not cache.store(PROMPT, [KVCache()])
    assert cache.fetch(["no token"]) == (None, ["no token"])
    cache.clear("all")
    assert cleared == ["all"]
    assert cache.fetch([*PROMPT, 5])[0] is None


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (None, "Scheduler"),
        (type("Scheduler", (), {"__init__": lambda self, config: None}), "Scheduler"),
        (scheduler_kind(SimpleNamespace(fetch=None, clear=None)), "memory_aware_cache"),
        (scheduler_kind(None, prefix_cache=object()), "prefix_cache"),
    ],
)
def test_a_scheduler_that_looks_different_is_left_alone_with_a_warning(
    kind: Any, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    adapt(TESTED, lambda _: "factory", SimpleNamespace(Scheduler=kind))  # type: ignore[arg-type, return-value]
    if kind is not None:
        scheduler = kind(None)
        assert getattr(scheduler, "prefix_cache", None) is None
    assert word in caplog.text
    assert TESTED in caplog.text
