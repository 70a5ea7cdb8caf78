"""Reusable prefixes of prompts."""

import mlx.core as mx

from paged_kv import PagedCacheFactory
from paged_kv.server.engine.prompt_fetcher import PromptReuse
from tests.support.stored_prompts import TEXT, shallow_model


def test_the_prompts_used_last_are_kept() -> None:
    model = shallow_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    reuse = PromptReuse([factory], max_prompts=2)
    prompts = [[first, *TEXT[:300]] for first in range(3)]
    for prompt in prompts:
        cache = factory.make_cache()
        model(mx.array([prompt]), cache=cache)
        reuse.insert(prompt, cache, "alice")
        assert cache == []
    found = [factory.peek([*prompt, 1], salt="alice")[0] for prompt in prompts]
    assert found == [0, 301, 301]
