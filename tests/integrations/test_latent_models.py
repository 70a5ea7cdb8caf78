"""Models with latent attention: tokens are mlx-lm's, and decode gathers nothing."""

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import (
    RotatingKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.layer_pages import LayerPages
from tests.support.generation import Run, assert_same_run, assert_same_runs, greedy, runs_of
from tests.support.grids import plain_only
from tests.support.quantised_oracle import oracle_caches
from tests.support.stored_prompts import computed, stored_factory, warm
from tests.support.zoo import small_model

LATENT = [
    "deepseek_v3",
    "mistral4",
    "longcat_flash",
    "kimi_linear",
    "bailing_moe_v3",
    "kimi_k25",
    "kimi_vl",
    "kimi_k3",
    "glm4_moe_lite",
    "longcat_flash_ngram",
    "bailing_hybrid",
    # They attend to the 32 tokens that an indexer chooses.
    "deepseek_v32",
    "glm_moe_dsa",
]
WITH_MAX_KV_SIZE = ["deepseek_v3", "mistral4", "kimi_k25", "kimi_vl", "glm4_moe_lite"]
# With recurrent layers (kimi_linear, bailing_hybrid), two caches a layer (longcat_flash), or an
# indexer that keeps mlx-lm's cache (deepseek_v32).
QUANTISABLE = [
    "deepseek_v3",
    "kimi_linear",
    "bailing_hybrid",
    "longcat_flash",
    "mistral4",
    "glm4_moe_lite",
    "deepseek_v32",
]
PLAIN = ["deepseek_v3", "mistral4", "deepseek_v32"]
TOLERANCE = 1e-4
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(270)]
PROMPTS = [PROMPT[:30], PROMPT[5:75], PROMPT[3:4]]


@pytest.fixture(scope="module", params=plain_only(PLAIN, LATENT))
def model(request: pytest.FixtureRequest) -> Any:
    return small_model(request.param)


@pytest.fixture(scope="module")
def deepseek() -> Any:
    return small_model("deepseek_v3")


@pytest.fixture(scope="module", params=plain_only(QUANTISABLE[:1], QUANTISABLE))
def quantisable(request: pytest.FixtureRequest) -> Any:
    """Its position keys have the 32 numbers that share a scale."""
    return small_model(request.param, qk_rope_head_dim=32)


def gathers(factory: PagedCacheFactory) -> int:
    gc.collect()
    return factory.stats().gather_fallbacks


def batched(model: Any, make_cache: Any) -> list[Run]:
    generator = BatchGenerator(model, max_tokens=6, prefill_step_size=64, completion_batch_size=3)
    uids = generator.insert(
        [list(each) for each in PROMPTS], caches=[make_cache() for _ in PROMPTS]
    )
    return runs_of(generator, uids)


def test_alone_in_a_batch_and_after_a_trim(model: Any, backend: str) -> None:
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    cache, stock = factory.make_cache(), make_prompt_cache(model)
    ours, theirs = (greedy(model, PROMPT, each, 8, 60) for each in (cache, stock))
    assert_same_run(ours, theirs, TOLERANCE)
    before = gathers(factory)
    for token in (1, 2, 3):
        logits = [model(mx.array([[token]]), cache=each) for each in (cache, stock)]
        assert mx.abs(logits[0] - logits[1]).max() < TOLERANCE
    del logits
    assert gathers(factory) == before
    if can_trim_prompt_cache(stock):
        trim_prompt_cache(stock, 20)
        trim_prompt_cache(cache, 20)
        ours, theirs = (greedy(model, PROMPT[:9], each, 6) for each in (cache, stock))
        assert_same_run(ours, theirs, TOLERANCE)
    # mlx-lm's own batch lets padding into the n-grams of longcat_flash_ngram.
    alone = [greedy(model, each, make_prompt_cache(model), 6, 64) for each in PROMPTS]
    assert_same_runs(batched(model, factory.make_cache), alone, TOLERANCE)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_a_batch_decodes_without_a_gather(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it make the graph of one, but for the models that name `cache.keys`."""
    deepseek = small_model(name)
    factory = PagedCacheFactory(deepseek, max_bytes=64 << 20)
    caches = [factory.make_cache() for _ in range(2)]
    for cache, prompt in zip(caches, PROMPTS, strict=False):
        mx.eval(deepseek(mx.array([prompt]), cache=cache))
    batch = [mine.merge([mine, other]) for mine, other in zip(*caches, strict=True)]
    before = gathers(factory)
    if name == "deepseek_v3":
        monkeypatch.delattr(LayerPages, "gather")
    for token in range(4):
        mx.eval(deepseek(mx.array([[token], [token + 1]]), cache=batch))
    assert gathers(factory) == before


def test_an_indexer_that_chooses_in_the_trial() -> None:
    """The trial has at most six tokens."""
    model: Any = small_model("deepseek_v32", index_topk=2)
    factory, stock = PagedCacheFactory(model, max_bytes=64 << 20), make_prompt_cache(model)
    ours = greedy(model, PROMPT[:20], factory.make_cache(), 4)
    assert factory.pool.attending_in_decode == {0, 1, 2}
    assert factory.pool.attends_in_order
    assert_same_run(ours, greedy(model, PROMPT[:20], stock, 4), TOLERANCE)


@pytest.mark.parametrize("page_format", ["q8", "q4", ("q8", "q4")])
def test_quantised_pages(quantisable: Any, backend: str, page_format: Any) -> None:
    factory = PagedCacheFactory(quantisable, page_format=page_format, max_bytes=64 << 20)
    ours = greedy(quantisable, PROMPT, factory.make_cache(), 6, 60)
    oracle = greedy(quantisable, PROMPT, oracle_caches(quantisable, page_format), 6, 60)
    assert_same_run(ours, oracle, 2e-3)


def test_auto_decodes_from_pages_of_several_formats(quantisable: Any, backend: str) -> None:
    factory = PagedCacheFactory(quantisable, page_format="auto", max_bytes="1MB")
    cache = factory.make_cache()
    greedy(quantisable, PROMPT * 6, cache, 1, 300)
    before = gathers(factory)
    logits = quantisable(mx.array([[7]]), cache=cache)
    mx.eval(logits)
    assert gathers(factory) == before
    formats = {each.page_format for each in factory.stats().groups[0].formats if each.used}
    assert formats > {"fp16"}
    stock = make_prompt_cache(quantisable)
    greedy(quantisable, PROMPT * 6, stock, 1, 300)
    # Pages of 4 bits shift logits, whose standard deviation is 2, by 0.1 to 0.4.
    assert mx.abs(logits - quantisable(mx.array([[7]]), cache=stock)).max() < 1


@pytest.mark.parametrize("size", [20, 300])
@pytest.mark.parametrize("name", plain_only(["deepseek_v3"], WITH_MAX_KV_SIZE))
def test_caches_with_max_kv_size(name: str, backend: str, size: int) -> None:
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    stock, ours = make_prompt_cache(model, size), factory.make_cache(size)
    assert isinstance(stock[0], RotatingKVCache)
    for token in PROMPT[: size // 2 + 40]:
        expected = model(mx.array([[token]]), cache=stock)
        assert mx.abs(model(mx.array([[token]]), cache=ours) - expected).max() < 1e-3


@pytest.mark.parametrize("page_format", ["fp16", "q4"])
def test_prefixes_from_memory_and_from_disk(
    quantisable: Any, backend: str, tmp_path: Path, page_format: str
) -> None:
    prompt = [*PROMPT, *PROMPT[:90]]
    factory = stored_factory(quantisable, tmp_path / "store", page_format=page_format)
    computed(quantisable, factory, prompt)
    longer = [*prompt, 5, 6, 7]
    # Prefill gathers keys here, so with quantised pages steps begin where they did.
    expected = greedy(quantisable, longer, factory.make_cache(), 4, 256)
    warmed, cached = warm(quantisable, factory, longer)
    assert cached == len(prompt)
    factory.close()
    again = stored_factory(quantisable, tmp_path / "store", page_format=page_format)
    restored, cached = warm(quantisable, again, longer)
    assert cached == len(prompt)
    again.close()
    assert_same_run(warmed, expected, 2e-3 if page_format == "fp16" else 0.5)
    assert mx.array_equal(warmed.logprobs, restored.logprobs)
