"""Models whose decode steps read chosen tokens, beside mlx-lm's caches and attention that hides the
others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from paged_kv import PagedCacheFactory
from tests.support.arrays import numbers
from tests.support.choices import chosen
from tests.support.generation import Run, assert_same_run, greedy
from tests.support.grids import plain_only
from tests.support.stored_prompts import read, stored_factory
from tests.support.zoo import model_that_tells_keys_apart, small_model

READ = 768
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(1270)]
TOLERANCE = 1e-4
MODULE: Any = qwen3
STOCK_ATTENTION = MODULE.scaled_dot_product_attention


@pytest.fixture(scope="module")
def model() -> Any:
    return model_that_tells_keys_apart()


@contextmanager
def attention_that_hides(read_tokens: int) -> Iterator[None]:
    """mlx-lm's attention to the tokens that a step should read, of one sequence."""

    def attend(queries: mx.array, keys: Any, values: Any, cache: Any, **options: Any) -> Any:
        if queries.shape[2] > 1:
            return STOCK_ATTENTION(queries, keys, values, cache=cache, **options)
        group = queries.shape[1] // keys.shape[1]
        seen = np.zeros((1, queries.shape[1], 1, keys.shape[2]), bool)
        for head, of_head in enumerate(numbers(keys[0])):
            own = slice(head * group, head * group + group)
            asked = numbers(queries[0, own, 0])
            seen[:, own, :, chosen(asked, of_head, options["scale"], read_tokens)] = True
        options["mask"] = mx.array(seen)
        return STOCK_ATTENTION(queries, keys, values, cache=cache, **options)

    MODULE.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        MODULE.scaled_dot_product_attention = STOCK_ATTENTION


def decoded(model: Any, prompt: list[int], count: int, **options: Any) -> Run:
    return greedy(model, prompt, PagedCacheFactory(model, **options).make_cache(), count)


def difference(ours: Run, others: Run) -> float:
    return float(mx.abs(ours.logprobs - others.logprobs).max())


@pytest.mark.slow
def test_a_step_reads_what_matters_most(model: Any) -> None:
    """The prompt's last token, and others until one is in the next page."""
    with attention_that_hides(READ):
        stock = greedy(model, PROMPT, make_prompt_cache(model), 14)
    ours = decoded(model, PROMPT, 14, read_tokens=READ)
    assert_same_run(ours, stock, TOLERANCE)
    assert difference(ours, decoded(model, PROMPT, 14)) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "name", plain_only(["qwen3"], ["qwen3", "gemma3_text", "qwen3_next", "deepseek_v3"])
)
def test_what_is_read_whole_has_the_same_bits(name: str) -> None:
    model, count = small_model(name), len(PROMPT) + 8
    exact = decoded(model, PROMPT, 8)
    assert difference(decoded(model, PROMPT, 8, read_tokens=count), exact) == 0


def test_a_shared_prefix_brings_its_summaries(model: Any) -> None:
    factory = PagedCacheFactory(model, read_tokens=READ)
    cold = greedy(model, PROMPT, factory.make_cache(), 12)
    read(model, factory, PROMPT[:1100])
    cache, cached = factory.fetch_cache(PROMPT)
    assert cached == 1100
    assert_same_run(greedy(model, PROMPT[cached:], cache, 12), cold, TOLERANCE)


@pytest.mark.parametrize("page_format", plain_only(["fp16"], ["fp16", "q4"]))
def test_pages_on_disk_bring_their_summaries(model: Any, tmp_path: Path, page_format: str) -> None:
    options = {"page_format": page_format}
    first = stored_factory(model, tmp_path, read_tokens=READ, **options)
    cache = first.make_cache()
    model(mx.array([PROMPT[:1100]]), cache=cache)
    assert first.insert_cache(PROMPT[:1100], cache) == 1100
    cold = greedy(model, PROMPT[1100:], cache, 12)
    first.close()
    for read_tokens, found in ((READ, 1024), (None, 0), (READ + 64, 0)):
        other = stored_factory(model, tmp_path, read_tokens=read_tokens, **options)
        cache, cached = other.fetch_cache(PROMPT)
        assert cached == found, read_tokens
        if cached:
            assert_same_run(greedy(model, PROMPT[cached:], cache, 12), cold, TOLERANCE)
        other.close()


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "loading"), [(READ, None), (None, READ)])
def test_saved_caches_load_with_and_without_summaries(
    model: Any, tmp_path: Path, saving: int | None, loading: int | None
) -> None:
    cache = PagedCacheFactory(model, read_tokens=saving).make_cache()
    model(mx.array([PROMPT[:-1]]), cache=cache)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache)
    factory = PagedCacheFactory(model, read_tokens=loading)
    with factory:
        loaded = load_prompt_cache(file)
    run = greedy(model, PROMPT[-1:], loaded, 12)
    assert_same_run(run, decoded(model, PROMPT, 12, read_tokens=loading), TOLERANCE)


def test_what_is_left_out_is_counted(model: Any) -> None:
    factory = PagedCacheFactory(model, read_tokens=READ)
    greedy(model, PROMPT[:700], factory.make_cache(), 3)
    assert factory.stats().tokens_chosen == factory.stats().tokens_left_out == 0
    greedy(model, PROMPT[:-6], factory.make_cache(), 3)
    stats = factory.stats()
    # mlx-lm computes one step more than it gives. Of the last run of each, so many are there.
    steps = {1264: 16, 1265: 17, 1266: 18, 1267: 19}
    assert stats.tokens_chosen == sum(736 + there for there in steps.values())
    assert stats.tokens_chosen + stats.tokens_left_out == sum(steps)
    assert "tokens_left_out" in stats.as_dict()
