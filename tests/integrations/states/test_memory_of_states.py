"""What a prompt leaves behind is its pages and its states, and nothing else of its step."""

import gc
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.integrations.batching.unpaged_caches import leaves
from tests.support.zoo import small_model

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


@pytest.mark.parametrize("name", ["jamba", "mamba2", "qwen3_next", "lfm2", "rwkv7"])
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
