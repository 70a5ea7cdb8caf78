"""A step is planned once for all layers, and leaves no lazy arrays behind."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import (
    PagedCacheFactory,
    PagePool,
    PagesNotRead,
    Sequence,
)
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.kernels.pages.page_format import page_format_named
from paged_kv.pool.layer_kinds import Window
from paged_kv.steps.batch import Batch
from paged_kv.steps.progress import LayerProgress, Progress
from tests.support.arrays import normal
from tests.support.generation import assert_same_run, greedy
from tests.support.layer_caches import caches_of
from tests.support.zoo import small_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def model_and_factory(name: str = "llama", **options: Any) -> tuple[Any, PagedCacheFactory]:
    model = small_model(name)
    return model, PagedCacheFactory(model, max_bytes=64 << 20, **options)


def step(count: int, seed: int, batch: int = 1) -> tuple[mx.array, mx.array]:
    keys = normal((batch, 2, count, 16), mx.float32, seed)
    return keys, keys + 1


@pytest.mark.usefixtures("backend")
def test_a_models_arrays_are_never_made_and_others_are() -> None:
    pool = PagePool(2, max_bytes=1 << 24)
    pool.attending = frozenset({0})
    attending, other = caches_of(pool)
    attending.make_mask(5)
    given = step(5, 1)
    keys, values = attending.update_and_fetch(*given)
    assert (keys.shape, values.dtype) == ((1, 2, 5, 16), mx.float32)
    for look in (np.array, mx.eval, lambda array: mx.eval(array @ array.swapaxes(2, 3))):
        with pytest.raises(RuntimeError, match="without a primitive"):
            look(keys)
    found, _ = other.update_and_fetch(*given)
    assert mx.array_equal(found, given[0])
    assert mx.array_equal(attending.keys, given[0])
    # Without a mask before it, the pool does not know that a model takes the step.
    found, _ = attending.update_and_fetch(*step(1, 2))
    assert found.shape == (1, 2, 6, 16)
    mx.eval(found)


@pytest.mark.usefixtures("backend")
def test_what_was_not_read_in_its_step_is_refused_later() -> None:
    """The step may have overwritten a ring by then."""
    pool = PagePool(1, windows={0: Window(20, 20)}, max_bytes=1 << 24)
    pool.attending = frozenset({0})
    (cache,) = caches_of(pool)
    cache.make_mask(5)
    keys, values = cache.update_and_fetch(*step(5, 1))
    cache.update_and_fetch(*step(1, 2))
    queries = normal((1, 4, 5, 16), mx.float32, 3)
    with pytest.raises(PagesNotRead, match="always_gather=True"):
        paged_attention(queries, keys, values, cache, 0.2, "causal")
    assert cache.size() == 6


def test_a_model_that_changes_its_ways_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model, factory = model_and_factory()
    expected = greedy(model, PROMPT, make_prompt_cache(model), 5)
    cache = factory.make_cache()
    model(mx.array([PROMPT[:3]]), cache=cache)

    def of_its_own(queries: Any, keys: Any, values: Any, *_: Any, **options: Any) -> mx.array:
        options.pop("cache", None)
        output: mx.array = mx.fast.scaled_dot_product_attention(
            queries, keys * 1, values, **options
        )
        return output

    monkeypatch.setattr(llama, "scaled_dot_product_attention", of_its_own)
    with pytest.raises(PagesNotRead, match=r"llama got keys.*always_gather=True"):
        model(mx.array([PROMPT[3:]]), cache=cache)
    assert {layer.size() for layer in cache} == {3}
    gathering = PagedCacheFactory(model, max_bytes=64 << 20, always_gather=True)
    assert_same_run(greedy(model, PROMPT, gathering.make_cache(), 5), expected, 1e-4)
    assert gathering.stats().gather_fallbacks > 0
    # The factory tries the model out, finds its own attention, and gives it arrays.
    later = PagedCacheFactory(model, max_bytes=64 << 20)
    assert_same_run(greedy(model, PROMPT, later.make_cache(), 5), expected, 1e-4)


@pytest.mark.parametrize(
    ("name", "attending"),
    [("llama", {0, 1, 2}), ("gemma2", {0, 1, 2}), ("phi3small", {1}), ("deepseek_v3", set())],
)
def test_the_layers_of_which_only_attention_reads(name: str, attending: set[int]) -> None:
    _, factory = model_and_factory(name)
    factory.make_cache()
    assert factory.pool.attending == attending
    in_decode = {0, 1, 2} if name == "deepseek_v3" else attending
    assert factory.pool.attending_in_decode == in_decode


def test_a_step_goes_on_in_the_padding_of_the_one_before() -> None:
    pool = PagePool(2, max_bytes=1 << 24)
    layers = caches_of(pool, 2)
    for layer in layers:
        layer.prepare(left_padding=[0, 3])
    for seed in (1, 2):
        layers[0].make_mask(2)
        for layer in layers:
            layer.update_and_fetch(*step(2, seed, batch=2))
    assert [each.context_lens for each in layers[0].sequences] == [[4, 4], [1, 1]]
    assert [each.progress(1).offset for each in layers[0].sequences] == [4, 1]


@pytest.mark.usefixtures("backend")
def test_a_long_step_is_read_right_before_and_after_it_is_written() -> None:
    """Its queries attend first: it is written when another call needs its pages."""
    pool = PagePool(2, windows={0: Window(32, 32), 1: Window(300, 256)}, max_bytes=1 << 24)
    layers = caches_of(pool)
    given = step(600, 1)
    for count, end in ((512, 512), (88, 600)):
        for layer in layers:
            layer.update_and_fetch(*[each[:, :, end - count : end] for each in given])
    for _ in range(2):
        for layer in layers:
            assert mx.array_equal(layer.keys[:, :, -31:], given[0][:, :, -31:])
        layers[0].sequences[0].commit()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("queries", "is_shared"), [(1, False), (5, False), (1, True)])
def test_attention_follows_pages_that_were_converted_since(queries: int, is_shared: bool) -> None:
    """By a request, or for all who share them, as when a pool is short of memory."""
    pool = PagePool(1, max_bytes=32 << 20)
    (cache,), (other,) = caches_of(pool), caches_of(pool)
    shape = (1, 1, 1000, 32)
    given = normal(shape, mx.float32, 1), normal(shape, mx.float32, 2)
    cache.update_and_fetch(*given)
    keys, values = cache.keys_and_values()
    if is_shared:
        (group,), (table,) = pool.groups, cache.sequences[0].tables.values()
        group.add_formats(page_format_named("q8"))
        group.recode(lambda: table.full_blocks(1000), "q8", pool.reclaimer.make_room)
    else:
        cache.to_quantized(bits=8)
    # Another sequence takes the pages that were freed.
    other.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
    asked = normal((1, 2, queries, 32), mx.float32, 3)
    mask: Any = None if queries == 1 else "causal"
    found = paged_attention(asked, keys, values, cache, 0.2, mask)
    expected = mx.fast.scaled_dot_product_attention(asked, *given, scale=0.2, mask=mask)
    assert mx.allclose(found, expected, atol=5e-3)


def test_forks_know_the_pages_that_they_share_until_a_block_changes() -> None:
    """And the next step knows it without another look."""
    pool = PagePool(1, max_bytes=1 << 24)
    parent = Sequence(pool)
    Batch.of(pool, [parent]).append(0, *[normal((1, 2, 300, 32), mx.float32, 1)] * 2)
    batch = Batch.of(pool, [parent.fork(0), parent.fork(0)])
    found = []
    for _ in range(3):
        keys, _ = batch.append(0, *[normal((2, 2, 1, 32), mx.float32, 2)] * 2)
        found.append(keys.read.group_step.metadata.shared_pages)
    assert found[0] is found[1] is found[2]
    assert found[0] is not None
    # Each has copied the page that it writes.
    assert found[0].shared.tolist() == [0, 1]


def test_layers_with_as_many_tokens_take_the_same_step() -> None:
    layers = LayerProgress(PagePool(3), [Progress(5), Progress(0), Progress(5, latest=2)])
    assert [layers.level_with(0), layers.level_with(1)] == [{0, 2}, {1}]


def test_a_fork_has_the_tokens_of_states_without_pages() -> None:
    sequence = Sequence(PagePool(0, max_bytes=1 << 20))
    sequence.begin_at(5, {})
    assert sequence.fork(0).length == 5
