"""`max_kv_size`: 4 sink tokens plus the most recent tokens, as in mlx-lm's rotating caches."""

import weakref
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.errors import warn_once
from tests.support.generation import assert_nothing_is_used, assert_same_run, greedy
from tests.support.grids import plain_only
from tests.support.zoo import small_model

# The first and the latest tokens are multiplied as one matrix, not in rotated order.
TOLERANCE = 1e-3
TOKENS = [(7 * i * i + 3 * i + 1) % 97 for i in range(700)]


@pytest.fixture(scope="module")
def model() -> Any:
    """A factory that leaves caches to mlx-lm, which then honours max_kv_size."""
    return small_model("qwen3", num_hidden_layers=1)


@pytest.mark.parametrize("size", plain_only([5, 24], [5, 24, 150]))
@pytest.mark.slow
def test_decoding_equals_stock_before_and_after_the_wrap(model: Any, size: int) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    stock, ours = make_prompt_cache(model, size), factory.make_cache(size)
    for token in TOKENS[: size + 40]:
        expected = model(mx.array([[token]]), cache=stock)
        assert mx.abs(model(mx.array([[token]]), cache=ours) - expected).max() < TOLERANCE
    assert [layer.offset for layer in ours] == [layer.offset for layer in stock]
    del ours
    assert_nothing_is_used(factory)


def test_a_prompt_gives_the_same_however_it_is_cut(model: Any) -> None:
    """In longer steps mlx-lm hides the sink tokens from most queries. These caches never do, so
    their results do not depend on the steps."""
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    prompt = TOKENS[:320]  # The ring of one page wraps.
    runs = [greedy(model, prompt, factory.make_cache(20), 3, step) for step in (7, 64, 2048)]
    for run in runs[1:]:
        assert_same_run(run, runs[0], TOLERANCE)


def test_a_saved_cache_goes_on(model: Any, tmp_path: Any) -> None:
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    cache = factory.make_cache(64)
    greedy(model, TOKENS, cache, 1)
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, cache)
    loaded = load_prompt_cache(file)
    assert_same_run(greedy(model, [5, 6], loaded, 6), greedy(model, [5, 6], cache, 6), 0.0)


def test_less_than_is_always_kept_is_refused(model: Any) -> None:
    for size in (0, 1, 4):
        with pytest.raises(ValueError, match=f"max_kv_size={size}"):
            PagedCacheFactory(model).make_cache(size)


def test_a_model_with_caches_of_its_own_ignores_it_as_with_mlx_lm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    size = 2
    warn_once.cache_clear()
    model: Any = small_model("llama")
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    stock, ours = make_prompt_cache(model, size), factory.make_cache(size)
    run = greedy(model, TOKENS[:300], ours, 8)
    assert_same_run(run, greedy(model, TOKENS[:300], stock, 8), TOLERANCE)
    assert [layer.offset for layer in ours] == [layer.offset for layer in stock]
    factory.make_cache(size)
    said = [record.message for record in caplog.records if "max_kv_size" in record.message]
    assert len(said) == 1
    # An ignored bound leaves pages unchanged: prompts are shared with those of other caches.
    factory.insert_cache(TOKENS[:300], ours)
    assert factory.fetch_cache(TOKENS[:300])[1] == 299


def test_bounds_in_turns_and_cached_prompts_leave_room_for_each_other(model: Any) -> None:
    """All share one budget; a bound without caches keeps nothing of it, and only the last one its
    pool."""
    factory = PagedCacheFactory(model, max_bytes=1 << 21)  # 16 pages
    pools = [weakref.ref(factory.pool)]
    for number in range(4, 10):
        cache, _ = factory.fetch_cache([number] * 700)
        model(mx.array([[number] * 700]), cache=cache)
        factory.insert_cache([number] * 700, cache)
        bound = factory.make_cache(100 * number)
        assert factory.can_admit(700)
        pools.append(weakref.ref(bound[0].pool))
        model(mx.array([[number] * 700]), cache=bound)
    del bound, cache
    assert [pool for pool in pools if pool() is not None] == [pools[0], pools[-1]]
    assert factory.fetch_cache([9] * 700)[1] == 699  # The oldest prompts went, not all.
    model(mx.array([[1] * 3000]), cache=factory.make_cache())
    factory.clear()
    assert factory.stats().bytes_mapped == factory.pool.budget.mapped == 0
