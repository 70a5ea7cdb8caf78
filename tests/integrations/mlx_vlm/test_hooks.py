"""Layers whose attention reads what an indexer chooses. `.ci/check_versions` runs these: they need
the extra vlm."""

from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vlm")

from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_vlm.generate import ar
from mlx_vlm.models import cache as vlm_cache

from paged_kv import PagedCacheFactory
from paged_kv.integrations.batching.prompt_caches import leaves
from paged_kv.integrations.states.one_by_one import SeparateCaches
from tests.support.vision_zoo import small_language_model

BYTES = 64 << 20
FOLDERS = ["glm5_next", "minimax_m3_vl", "qwen4_exp"]
# Longer than a page; their indexers choose some 32 tokens.
PROMPT = [(7 * at * at + 3 * at + 1) % 97 for at in range(290)]
STEP = 64


@pytest.fixture(scope="module", autouse=True)
def quick_models() -> Iterator[None]:
    """Models whose small functions are not compiled, which takes a CPU ten seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module", params=FOLDERS)
def model(request: pytest.FixtureRequest) -> Any:
    return small_language_model(request.param)


@pytest.fixture(scope="module")
def expected(model: Any) -> mx.array:
    return continued(model, vlm_cache.make_prompt_cache(model), PROMPT)


def continued(model: Any, cache: list[Any], tokens: list[int]) -> mx.array:
    """The logits of 8 tokens that follow, computed greedily, [8, vocabulary]."""
    found = [read(model, cache, tokens)]
    while len(found) < 8:
        best: Any = mx.argmax(found[-1])
        found.append(read(model, cache, [best.item()]))
    return mx.stack(found)


def read(model: Any, cache: list[Any], tokens: list[int]) -> mx.array:
    """The logits of the last token, [vocabulary]."""
    for at in range(0, len(tokens), STEP):
        logits: mx.array = model(mx.array([tokens[at : at + STEP]]), cache=cache).logits
    mx.eval(logits)
    return logits[0, -1]


def are_close(some: mx.array, others: mx.array) -> bool:
    """Within what another order of sums changes."""
    return mx.allclose(some, others, rtol=0, atol=1e-3).item() is True


def test_prompts_resume_from_cached_ones(model: Any, expected: mx.array) -> None:
    """Also if the sequence went on, behind tokens that no prompt has."""
    factory = PagedCacheFactory(model, max_bytes=BYTES)
    cache, cached = factory.fetch_cache(PROMPT)
    assert cached == 0
    read(model, cache, PROMPT[:270])
    for token in range(6):
        read(model, cache, [token])
    factory.insert_cache(PROMPT[:270], cache)
    for _ in range(2):  # The first changes nothing that the second finds.
        again, cached = factory.fetch_cache(PROMPT)
        assert cached == 270
        assert are_close(continued(model, again, PROMPT[cached:]), expected)


def test_prompts_resume_from_a_store(model: Any, expected: mx.array, tmp_path: Path) -> None:
    for found in (0, 256):
        with closing(PagedCacheFactory(model, max_bytes=BYTES, store=tmp_path)) as factory:
            cache, cached = factory.fetch_cache(PROMPT)
            assert cached == found
            if cached:
                assert are_close(continued(model, cache, PROMPT[cached:]), expected)
            else:
                read(model, cache, PROMPT[:256])
                factory.insert_cache(PROMPT[:256], cache)


def test_a_hybrid_resumes_from_a_store(tmp_path: Path) -> None:
    model = small_language_model("qwen3_5")
    expected = continued(model, vlm_cache.make_prompt_cache(model), PROMPT)
    test_prompts_resume_from_a_store(model, expected, tmp_path)


def test_decode_reads_what_is_chosen(model: Any, expected: mx.array) -> None:
    factory = PagedCacheFactory(model, max_bytes=BYTES)
    cache = factory.make_cache()
    read(model, cache, PROMPT[:-1])
    gathers = factory.stats().gather_fallbacks
    assert are_close(continued(model, cache, PROMPT[-1:]), expected)
    is_by_head = "minimax" in type(model).__module__
    assert (factory.stats().gather_fallbacks > gathers) == is_by_head


def test_a_failed_step_changes_nothing(
    model: Any, expected: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PagedCacheFactory(model, max_bytes=BYTES).make_cache()
    read(model, cache, PROMPT[:-5])
    kind, calls = type(model.layers[0]), count(1)
    stock = kind.__call__

    def fails_at_last(*args: Any, **options: Any) -> Any:
        return 1 / 0 if next(calls) == len(model.layers) else stock(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__call__", fails_at_last)
        with pytest.raises(ZeroDivisionError):
            read(model, cache, PROMPT[-5:])
    assert are_close(continued(model, cache, PROMPT[-5:]), expected)


def test_caches_are_saved_and_loaded(model: Any, expected: mx.array, tmp_path: Path) -> None:
    factory = PagedCacheFactory(model, max_bytes=BYTES)
    cache = factory.make_cache()
    read(model, cache, PROMPT[:270])
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert are_close(continued(model, loaded, PROMPT[270:]), expected)


def test_one_row_at_a_time_in_mlx_vlms_batches(model: Any, expected: mx.array) -> None:
    with PagedCacheFactory(model, max_bytes=BYTES):
        assert are_close(continued(model, ar._make_cache(model, [0]), PROMPT), expected)
        with pytest.raises(NotImplementedError, match="one at a time"):
            ar._make_cache(model, [0, 2])


def test_trimmed_tokens_leave_the_index_too() -> None:
    model = small_language_model("minimax_m3_vl")
    expected = continued(model, vlm_cache.make_prompt_cache(model), PROMPT)
    cache = PagedCacheFactory(model, max_bytes=BYTES).make_cache()
    read(model, cache, [*PROMPT[:270], *PROMPT[:30]])
    trim_prompt_cache(cache, 30)
    assert are_close(continued(model, cache, PROMPT[270:]), expected)


def test_projections_of_latents_are_not_kept() -> None:
    model = small_language_model("glm5_next")
    cache = PagedCacheFactory(model, max_bytes=BYTES).make_cache()
    read(model, cache, PROMPT)
    states = [each for each in leaves(cache[1:2]) if isinstance(each, SeparateCaches)]
    assert sum(each.nbytes for each in states) < len(PROMPT) * 16 * 4
