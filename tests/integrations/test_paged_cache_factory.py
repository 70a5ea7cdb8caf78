"""The promises of a factory: limits, freed memory, caches saved beyond the process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache, save_prompt_cache

from paged_kv import PagedCacheFactory, PoolExhausted
from tests.support.folders import ROOT
from tests.support.generation import assert_nothing_is_used, assert_same_run, greedy
from tests.support.zoo import small_model

# Where a kernel computes attention, float32 sums have another order, carried through random layers.
TOLERANCE = 1e-4
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(300)]


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model("qwen3")


def block_bytes(model: Any) -> int:
    """Bytes of 256 tokens in all layers."""
    factory = PagedCacheFactory(model, max_bytes=1 << 30)
    factory.can_admit(1)
    size: int = factory.pool.groups[0].allocator.formats[0].block_bytes
    return size


def test_generation_goes_on_after_memory_is_freed(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=3 * block_bytes(model))
    first, second = factory.make_cache(), factory.make_cache()
    greedy(model, PROMPT, first, 1)
    with pytest.raises(PoolExhausted, match="max_bytes") as error:
        greedy(model, PROMPT, second, 1)
    expected = {"needed": 2, "free": 1, "evictable": 0, "budget": 3 * block_bytes(model)}
    assert {name: getattr(error.value, name) for name in expected} == expected
    # The prompt that did not fit left nothing behind from its first step.
    assert {layer.offset for layer in second} == {0}
    del first
    stock = greedy(model, PROMPT, make_prompt_cache(model), 4)
    assert_same_run(greedy(model, PROMPT, second, 4), stock, TOLERANCE)
    del second, error  # its traceback holds the cache
    assert_nothing_is_used(factory)


def test_can_admit_counts_whole_blocks_that_are_or_can_be_had(model: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=3 * block_bytes(model))
    assert [factory.can_admit(tokens) for tokens in (0, 1, 768, 769)] == [True, True, True, False]
    # Nothing is computed to learn how large blocks are.
    assert (factory.stats().slabs, factory.stats().gather_fallbacks) == (0, 0)
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 1)
    assert [factory.can_admit(tokens) for tokens in (256, 257)] == [True, False]
    del cache
    assert factory.can_admit(768)


CONTINUE_ELSEWHERE = """
import sys
from mlx_lm.models.cache import load_prompt_cache
from paged_kv import PagedCacheFactory
from tests.support.generation import greedy
from tests.support.zoo import small_model

model = small_model(sys.argv[1])
factory = PagedCacheFactory(model, page_format=tuple(sys.argv[3].split("/")), max_bytes=1 << 26)
cache = load_prompt_cache(sys.argv[2])
print(greedy(model, [5, 6, 7], cache, 8).tokens)
print(factory.stats().blocks_by_format, sorted({type(layer).__name__ for layer in cache}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "page_format"),
    [("gemma3_text", "q8/q4"), ("deepseek_v32", "fp16/fp16")],
)
def test_a_saved_cache_goes_on_in_a_fresh_process(
    name: str, page_format: str, tmp_path: Path
) -> None:
    model, formats = small_model(name), page_format.split("/")
    factory = PagedCacheFactory(model, page_format=(formats[0], formats[1]), max_bytes=1 << 26)
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 1, 32)
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, cache)
    kinds = sorted({type(layer).__name__ for layer in cache})
    used = factory.stats().blocks_by_format
    continued = greedy(model, [5, 6, 7], cache, 8).tokens
    command = [sys.executable, "-c", CONTINUE_ELSEWHERE, name, file, page_format]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [str(continued), f"{used} {kinds}"]


def test_a_cache_class_that_nobody_knows_is_named() -> None:
    """What it holds would be lost: no pages, no prefixes, and no error."""

    class OwnCache(KVCache):
        pass

    model = small_model("llama")
    own: Any = OwnCache
    model.make_cache = lambda: [own()]
    with pytest.raises(TypeError, match="OwnCache"):
        PagedCacheFactory(model, max_bytes=1 << 20)


def test_a_budget_that_holds_no_page_is_refused_before_anything_is_written(model: Any) -> None:
    least = block_bytes(model)
    for use, arguments in (("make_cache", ()), ("fetch_cache", ([1, 2],)), ("can_admit", (0,))):
        factory = PagedCacheFactory(model, max_bytes=least - 1)
        for _ in range(2):
            with pytest.raises(PoolExhausted, match=f"max_bytes to at least {least:,}"):
                getattr(factory, use)(*arguments)
    PagedCacheFactory(model, max_bytes=least).make_cache()


def test_contents_and_dtype_of_a_cache_cannot_be_replaced() -> None:
    own = small_model("llama")
    cache = PagedCacheFactory(own, max_bytes=1 << 26).make_cache()
    greedy(own, PROMPT, cache, 1)
    for name in ("keys", "values"):
        with pytest.raises(ValueError, match="update_and_fetch"):
            setattr(cache[0], name, getattr(cache[0], name) * 2)
        with pytest.raises(ValueError, match="update_and_fetch"):
            getattr(cache[0], name)[..., :2, :] = 0
    own.set_dtype(mx.float16)
    with pytest.raises(ValueError, match="PagedCacheFactory"):
        greedy(own, PROMPT, cache, 1)
