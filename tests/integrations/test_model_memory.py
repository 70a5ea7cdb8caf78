"""The memory that steps take besides pages, and what they leave behind."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, Sequence
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.integrations.batching.prompt_caches import leaves
from tests.support.backends import instruction_sets
from tests.support.grids import plain_only
from tests.support.zoo import small_model

TOKENS, STEPS = 6_130, 20


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


LONG, HEADS, DIM = 32 * 1024, 2, 64
SIXTEEN_BIT_BYTES = 2 * LONG * HEADS * DIM * 2


def attend(cache: PagedKVCache, queries: mx.array, step: mx.array) -> None:
    """A step of a model that drops the gathered arrays at once: otherwise MLX would compute
    them."""
    keys, values = cache.update_and_fetch(step, step)
    mask = None if queries.shape[2] == 1 else "causal"
    mx.eval(paged_attention(queries, keys, values, cache, 0.125, mask))


@pytest.mark.slow
@pytest.mark.skipif(not instruction_sets(), reason="the plain backend may copy what it reads")
@pytest.mark.parametrize("page_format", ["q8", "q4"])
@pytest.mark.parametrize("queries", [1, 128])
def test_attention_to_32k_tokens_takes_no_memory_of_their_size(
    page_format: str, queries: int
) -> None:
    pool = PagePool(1, page_format=page_format, max_bytes=SIXTEEN_BIT_BYTES)
    cache = PagedKVCache(pool, 0, [Sequence(pool)])
    for _ in range(0, LONG, 4096):
        step = mx.random.normal((1, HEADS, 4096, DIM)).astype(mx.float16)
        attend(cache, step[:, :, :1], step)
    asked = mx.random.normal((1, 4 * HEADS, queries, DIM)).astype(mx.float16)
    new = mx.random.normal((1, HEADS, queries, DIM)).astype(mx.float16)
    mx.eval(asked, new)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    attend(cache, asked, new)
    # The step may have needed another slab.
    stats = pool.stats()
    slab_bytes = max(pool.groups[0].allocator.slabs.values()) * stats.bytes_active
    most = slab_bytes // stats.blocks_used + SIXTEEN_BIT_BYTES // 16
    assert mx.get_peak_memory() - before < most


PROMPT = [(7 * at) % 50 + 1 for at in range(512)]
# Offsets and masks of a few bytes.
SMALL = 4096


def read_prompt(model: Any, factory: PagedCacheFactory) -> list[Any]:
    cache = factory.make_cache()
    model(mx.array([PROMPT]), cache=cache)
    mx.eval([each.state for each in cache])
    return cache


def bytes_in_use() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.parametrize(
    "name", plain_only(["qwen3_next"], ["jamba", "mamba2", "qwen3_next", "lfm2", "rwkv7"])
)
def test_states_keep_nothing_of_the_step_that_made_them(name: str) -> None:
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    # Constants that a model makes in its first step stay.
    read_prompt(model, factory)
    gc.collect()
    factory.pool.clear()
    before = bytes_in_use()
    cache = read_prompt(model, factory)
    held = bytes_in_use() - before
    arrays = [array for each in leaves(cache) for array in getattr(each, "cache", [])]
    states = sum(array.nbytes for array in arrays if isinstance(array, mx.array))
    assert states > 0
    assert held <= states + factory.stats().bytes_mapped + SMALL
