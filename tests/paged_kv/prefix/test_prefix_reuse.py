"""A cached prefix is not computed again, and the results equal those of a cold prompt."""

import copy
import random
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from paged_kv import PagedCacheFactory
from paged_kv.integrations.model_version import ModelVersion
from tests.support.generation import Run, assert_same_run, assert_same_runs, greedy, runs_of
from tests.support.stored_prompts import TEXT, cold, read, shallow_model

# A step of another length uses other kernels: float32 sums in another order.
TOLERANCE = 1e-3


def warm(model: Any, factory: PagedCacheFactory, prompt: list[int]) -> tuple[Run, int]:
    """A run after the cached part of a prompt, and the length of that part."""
    cache, cached = factory.fetch_cache(prompt)
    run = greedy(model, prompt[cached:], cache, 4)
    factory.insert_cache(prompt + run.tokens, cache)
    factory.pool.check()
    return run, cached


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return shallow_model("qwen3")


SPLITS = (1, 255, 256, 257, 512, 513)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "falcon_h1")),
    ],
)
def test_every_split_gives_the_tokens_of_a_cold_prompt(name: str) -> None:
    """Each alone, and all of them in one batch."""
    model = shallow_model(name)
    factory = PagedCacheFactory(model)
    expected = cold(model, TEXT[:530], 3)
    for split in SPLITS:
        read(model, factory, TEXT[:split])
        cache, cached = factory.fetch_cache(TEXT[:530])
        assert cached == split
        assert_same_run(greedy(model, TEXT[split:530], cache, 3), expected, TOLERANCE)
    prompts = [[*TEXT[:split], TEXT[split] + 1, *TEXT[:row]] for row, split in enumerate(SPLITS)]
    found = [factory.fetch_cache(prompt) for prompt in prompts]
    assert [cached for _, cached in found] == list(SPLITS)
    generator = BatchGenerator(model, max_tokens=3)
    rest = [prompt[cached:] for prompt, (_, cached) in zip(prompts, found, strict=True)]
    runs = runs_of(generator, generator.insert(rest, caches=[cache for cache, _ in found]))
    generator.close()
    assert_same_runs(runs, [cold(model, prompt, 3) for prompt in prompts], 2e-3)


def test_what_a_prompt_would_find_and_which_of_its_pages_are_in_use(qwen3: Any) -> None:
    factory = PagedCacheFactory(qwen3)
    assert factory.peek(TEXT[:700]) == (0, 0)
    warm(qwen3, factory, TEXT[:600])
    assert factory.peek(TEXT[:700]) == (600, 0)
    assert factory.peek(TEXT[:500], salt="other") == (0, 0)
    cache, _ = factory.fetch_cache(TEXT[:300])
    # The second page is copied before it is written, so only the first one is shared for good.
    assert factory.peek(TEXT[:500]) == (499, 256)
    greedy(qwen3, TEXT[299:300], cache, 1)
    assert factory.peek(TEXT[:500]) == (499, 256)
    del cache
    assert factory.peek(TEXT[:500]) == (499, 0)


@pytest.mark.parametrize("is_fetched", [False, True])
def test_other_weights_share_nothing(qwen3: Any, is_fetched: bool) -> None:
    """Neither what was inserted before weights changed, nor what was begun then."""
    model = copy.deepcopy(qwen3)
    factory = PagedCacheFactory(model)
    warm(model, factory, TEXT[:200])
    cache = factory.fetch_cache(TEXT[:300])[0] if is_fetched else factory.make_cache()
    greedy(model, TEXT[:300], cache, 1)
    projection = model.layers[0].self_attn.k_proj
    projection.weight = projection.weight * 1.5
    assert factory.fetch_cache(TEXT[:201])[1] == 0
    factory.insert_cache(TEXT[:300], cache)
    assert factory.fetch_cache(TEXT[:301])[1] == 0


def test_the_same_numbers_in_another_dtype_are_other_weights(qwen3: Any) -> None:
    model = copy.deepcopy(qwen3)
    model.set_dtype(mx.bfloat16)
    version = ModelVersion(model)
    assert version.number == 0
    model.set_dtype(mx.float32)
    assert version.number == 1
    assert version.number == 1


@pytest.mark.parametrize("page_format", ["q4", "fp16"])
def test_a_prompt_that_parts_within_a_quantised_page_goes_on_before_it(
    qwen3: Any, page_format: str
) -> None:
    factory = PagedCacheFactory(qwen3, page_format=page_format)
    warm(qwen3, factory, TEXT[:700])
    prompt = [*TEXT[:400], *TEXT[:60]]
    run, cached = warm(qwen3, factory, prompt)
    assert cached == (256 if page_format == "q4" else 400)
    assert_same_run(run, cold(qwen3, prompt, page_format=page_format), TOLERANCE)


def test_several_threads_look_up_insert_and_drop(qwen3: Any) -> None:
    factory = PagedCacheFactory(qwen3)
    warm(qwen3, factory, TEXT[:600])
    failures: list[BaseException] = []

    def come_and_go(seed: int) -> None:
        numbers = random.Random(seed)
        try:
            for _ in range(15):
                prompt = TEXT[: numbers.randrange(2, 640)]
                cache, cached = factory.fetch_cache(prompt)
                assert cached == min(len(prompt) - 1, 600)
                fork = copy.deepcopy(cache)
                for layer in fork:
                    layer.trim(numbers.randrange(cached + 1))
                factory.insert_cache(prompt[:cached], cache)
                factory.can_admit(1000)
                factory.stats()
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=come_and_go, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    factory.pool.check()
    assert factory.stats().blocks_used == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["falcon_h1", "gemma3_text", pytest.param("mamba", marks=pytest.mark.soak)]
)
def test_agents_get_cold_tokens_whatever_is_evicted(name: str) -> None:
    """Conversations go on, part and begin while there is room for few states and pages."""
    model = shallow_model(name)
    probe = PagedCacheFactory(model)
    read(model, probe, TEXT[:300])
    one = probe.prefixes.snapshots.nbytes
    factory = PagedCacheFactory(model, max_bytes=8 * max(probe.stats().bytes_mapped, one))
    states = factory.prefixes.snapshots
    states.max_bytes = 4 * one
    rng = random.Random(name)
    texts, found = [TEXT[:300]], 0
    for _ in range(25):
        number = rng.randrange(len(texts))
        text = texts[number]
        if rng.random() < 0.4:  # a sub-agent, or a turn that is asked again
            texts = [*texts[-3:], text[: rng.choice([300, 512, len(text)])]]
            number = len(texts) - 1
        text = [*texts[number], *(rng.randrange(97) for _ in range(rng.randrange(1, 90)))][:900]
        found += factory.peek(text).num_tokens
        cache, cached = factory.fetch_cache(text)
        if (parting := factory.parting(text)) > cached:
            model(mx.array([text[cached:parting]]), cache=cache)
            factory.insert_cache(text[:parting], cache)
            cached = parting
        run = greedy(model, text[cached:], cache, 3)
        factory.insert_cache(text + run.tokens, cache)
        del cache
        factory.pool.check()
        assert states.nbytes <= states.max_bytes
        assert_same_run(run, cold(model, text, 3), TOLERANCE)
        texts[number] = text + run.tokens
    assert found > 1500
