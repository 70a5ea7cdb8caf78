"""Models that cast or tile keys, call MLX's attention, or mask one token more than their window."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache, trim_prompt_cache

from paged_kv import PagedCacheFactory
from tests.support.generation import assert_same_run, greedy
from tests.support.grids import plain_cases
from tests.support.quantised_oracle import oracle_caches
from tests.support.stored_prompts import TEXT, stored_factory, warm
from tests.support.zoo import small_model

NAMES = ["stablelm", "plamo", "plamo2", "plamo3"]
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_prefix_continues_as_in_mlx_lm(name: str, tmp_path: Path) -> None:
    model: Any = small_model(name)
    prompt = TEXT[:300]
    factory, stock = stored_factory(model, tmp_path), make_prompt_cache(model)
    cache = factory.make_cache()
    for each in (cache, stock):  # In the same steps: plamo3's results depend on them.
        mx.eval(model(mx.array([prompt[:270]]), cache=each))
    factory.insert_cache(prompt[:270], cache)
    del cache
    factory.close()
    later = stored_factory(model, tmp_path)
    run, cached = warm(model, later, prompt)
    assert cached == 270
    assert_same_run(run, greedy(model, prompt[270:], stock, 4), TOLERANCE)
    assert later.stats().gather_fallbacks == 0


@pytest.mark.parametrize("name", ["stablelm", "plamo", "plamo3"])
def test_trimmed_tokens_are_written_again(name: str) -> None:
    model, runs = small_model(name), []
    factory = PagedCacheFactory(model)
    for cache in (factory.make_cache(), make_prompt_cache(model)):
        greedy(model, TEXT[:20], cache, 4)
        trim_prompt_cache(cache, 9)
        runs.append(greedy(model, TEXT[50:58], cache, 8))
    assert_same_run(runs[0], runs[1], TOLERANCE)
    assert factory.stats().gather_fallbacks == 0


@pytest.mark.parametrize(
    ("name", "page_format"),
    plain_cases([("plamo2", "q4")], [(name, each) for name in NAMES for each in ("q8", "q4")]),
)
def test_quantised_pages(name: str, page_format: str) -> None:
    """The oracle reads a whole step alike, so steps end where pages do. Windows keep 16 bits: they
    are mlx-lm's, as what plamo3 sees of the one more token that it asks for depends on steps."""
    model = small_model(name)
    pairs = zip(make_prompt_cache(model), oracle_caches(model, page_format), strict=True)
    caches = [stock if type(stock) is RotatingKVCache else oracle for stock, oracle in pairs]
    factory = PagedCacheFactory(model, page_format=page_format)
    cache = factory.make_cache()
    ours = greedy(model, TEXT[:560], cache, 6, 64)
    assert_same_run(ours, greedy(model, TEXT[:560], caches, 6, 64), 2e-3)
    held = [group.formats for group in factory.stats().groups if group.window is None]
    assert any(each.page_format == page_format and each.used for each in held[0])
    assert factory.stats().gather_fallbacks == 0
