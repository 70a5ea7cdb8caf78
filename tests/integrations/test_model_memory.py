"""The memory of a model's steps besides the pages; mlx-lm's caches copy all their content there."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory
from tests.support.zoo import small_model

TOKENS, STEPS = 6_100, 60


def filled(cache: list[Any], model: Any, tokens: int) -> list[Any]:
    attention = model.layers[0].self_attn
    heads = attention.n_kv_heads
    dim = attention.k_proj.weight.shape[0] // heads
    zeros = mx.zeros((1, heads, tokens, dim))
    for layer in cache:
        layer.update_and_fetch(zeros, zeros)
        mx.eval(layer.state)
    return cache


def highest(model: Any, cache: list[Any], mapped: Callable[[], int] = lambda: 0) -> int:
    """The most bytes that a decoding step takes beside the bytes in use before it and newly mapped
    ones."""
    # What earlier tests left, freed within a step, would hide what the step takes.
    gc.collect()
    mx.synchronize()
    spikes = []
    for _ in range(STEPS):
        before = mx.get_active_memory() - mapped()
        mx.reset_peak_memory()
        mx.eval(model(mx.array([[1]]), cache=cache))
        spikes.append(mx.get_peak_memory() - mapped() - before)
    return max(spikes)


def test_a_model_grows_without_a_spike() -> None:
    model = small_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    stock = filled(make_prompt_cache(model), model, TOKENS)
    held = sum(layer.nbytes for layer in stock)
    paged = filled(factory.make_cache(), model, TOKENS)
    spike = highest(model, paged, lambda: factory.stats().bytes_mapped)
    # mlx-lm's layers grow one after the other, each by a copy.
    assert highest(model, stock) > held // len(stock)
    assert spike < held // len(stock) // 10


def test_a_fork_that_is_written_copies_one_page_of_a_layer() -> None:
    model = small_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    cache = filled(factory.make_cache(), model, 8_000)
    page_bytes = cache[0].nbytes // -(-8_000 // 256)
    mapped = factory.stats().bytes_mapped
    fork = copy.deepcopy(cache)
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        mx.eval(model(mx.array([[1]]), cache=fork))
    grown = factory.stats().bytes_mapped - mapped
    assert 0 < grown <= mapped // 16
    assert mx.get_peak_memory() - active - grown < 2 * page_bytes * len(cache)
    assert factory.stats().cow_copies == len(factory.stats().groups)
