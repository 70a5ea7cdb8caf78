"""Models with latent attention: tokens are mlx-lm's, and decode gathers nothing."""

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    RotatingKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.layer_pages import LayerPages
from tests.support.generation import assert_same_run, greedy
from tests.support.grids import plain_only
from tests.support.quantised_oracle import oracle_caches
from tests.support.zoo import small_model

LATENT = [
    "deepseek_v3",
    "mistral4",
    "longcat_flash",
    "kimi_k25",
    "kimi_vl",
    "glm4_moe_lite",
    "longcat_flash_ngram",
    "bailing_hybrid",
    # They attend to the 32 tokens that an indexer chooses.
    "deepseek_v32",
    "glm_moe_dsa",
]
# The others have two caches a layer, or an indexer that keeps mlx-lm's cache.
OTHERS = ["longcat_flash", "deepseek_v32"]
TOLERANCE = 1e-4
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(270)]


@pytest.fixture(
    scope="module",
    params=["deepseek_v3", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)],
)
def quantisable(request: pytest.FixtureRequest) -> Any:
    """Its position keys have the 32 numbers that share a scale."""
    return small_model(request.param, qk_rope_head_dim=32)


def gathers(factory: PagedCacheFactory) -> int:
    gc.collect()
    return factory.stats().gather_fallbacks


@pytest.mark.parametrize("name", plain_only(["deepseek_v3", "deepseek_v32"], LATENT))
@pytest.mark.slow
def test_decode_reads_pages_also_after_a_trim(name: str) -> None:
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    cache, stock = factory.make_cache(), make_prompt_cache(model)
    ours, theirs = (greedy(model, PROMPT, each, 4, 90) for each in (cache, stock))
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
        ours, theirs = (greedy(model, PROMPT[:9], each, 4) for each in (cache, stock))
        assert_same_run(ours, theirs, TOLERANCE)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_a_batch_decodes_without_a_gather(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it make the graph of one, but for the models that name `cache.keys`."""
    deepseek = small_model(name)
    factory = PagedCacheFactory(deepseek, max_bytes=64 << 20)
    caches = [factory.make_cache() for _ in range(2)]
    for cache, length in zip(caches, (30, 70), strict=True):
        mx.eval(deepseek(mx.array([PROMPT[:length]]), cache=cache))
    batch = [mine.merge([mine, other]) for mine, other in zip(*caches, strict=True)]
    before = gathers(factory)
    if name == "deepseek_v3":
        monkeypatch.delattr(LayerPages, "gather")
    for token in range(4):
        mx.eval(deepseek(mx.array([[token], [token + 1]]), cache=batch))
    assert gathers(factory) == before


@pytest.mark.parametrize("page_format", ["q8", ("q8", "q4")])
def test_quantised_pages(quantisable: Any, page_format: Any) -> None:
    factory = PagedCacheFactory(quantisable, page_format=page_format, max_bytes=64 << 20)
    ours = greedy(quantisable, PROMPT, factory.make_cache(), 6, 60)
    oracle = greedy(quantisable, PROMPT, oracle_caches(quantisable, page_format), 6, 60)
    assert_same_run(ours, oracle, 2e-3)


def test_auto_decodes_from_pages_of_several_formats(backend: str) -> None:
    model = small_model("deepseek_v3", qk_rope_head_dim=32, num_hidden_layers=2)
    factory = PagedCacheFactory(model, page_format="auto", max_bytes="500KB")
    cache = factory.make_cache()
    greedy(model, PROMPT * 4, cache, 1, 300)
    before = gathers(factory)
    logits = model(mx.array([[7]]), cache=cache)
    mx.eval(logits)
    assert gathers(factory) == before
    formats = {each.page_format for each in factory.stats().groups[0].formats if each.used}
    assert formats > {"fp16"}
    stock = make_prompt_cache(model)
    greedy(model, PROMPT * 4, stock, 1, 300)
    # Pages of 4 bits shift logits, whose standard deviation is 2, by 0.1 to 0.4.
    assert mx.abs(logits - model(mx.array([[7]]), cache=stock)).max() < 1


def test_caches_with_max_kv_size() -> None:
    model = small_model("deepseek_v3", num_hidden_layers=1)
    stock, ours = make_prompt_cache(model, 20), PagedCacheFactory(model).make_cache(20)
    assert isinstance(stock[0], RotatingKVCache)
    for token in PROMPT[:45]:
        expected = model(mx.array([[token]]), cache=stock)
        assert mx.abs(model(mx.array([[token]]), cache=ours) - expected).max() < 1e-3
