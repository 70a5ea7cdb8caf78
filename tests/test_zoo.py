"""Every model file of mlx-lm that can be built small: alone and in a batch, paged as with stock."""

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory
from tests.generation import Run, assert_same_run, greedy
from tests.zoo import ZOO, small_model

# Float32 sums in another order, where a kernel computes attention, carried through random layers;
# near ties among random weights lie closer than this.
ALONE_TOLERANCE = 1e-3
BATCH_TOLERANCE = 2e-3
# What mlx-lm cannot batch with its own caches, by the error it gives.
STOCK_CANNOT_BATCH = {"deepseek_v41", "gemma2", "gpt_bigcode", "llama4", "phi3small"}
# Stock's batch differs from its single runs: the paged batch is compared with those instead.
STOCK_BATCH_DIFFERS = {"bailing_moe_linear", "jamba"}
# The configuration has a layer without attention that stock's batch does not provide for.
ONLY_PAGED_CAN_BATCH = {"nemotron-nas"}
LENGTHS = (3, 70, 1, 40)
PROMPTS = [[(7 * i * i + 3 * i + 1 + k) % 97 for i in range(n)] for k, n in enumerate(LENGTHS)]
NEW_TOKENS = 5


def batched(model: Any, make_cache: Callable[[], Any]) -> list[Run]:
    generator = BatchGenerator(
        model,
        max_tokens=NEW_TOKENS,
        prefill_step_size=16,
        completion_batch_size=3,
        prefill_batch_size=2,
    )
    uids = generator.insert([list(p) for p in PROMPTS], caches=[make_cache() for _ in PROMPTS])
    given: dict[int, list[Any]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            given[response.uid].append(response)
    return [
        Run([each.token for each in given[uid]], mx.stack([each.logprobs for each in given[uid]]))
        for uid in uids
    ]


def alone(model: Any, make_cache: Callable[[], Any]) -> list[Run]:
    return [greedy(model, prompt, make_cache(), NEW_TOKENS, 16) for prompt in PROMPTS]


def assert_same_runs(ours: list[Run], stock: list[Run], tolerance: float) -> None:
    for our_run, stock_run in zip(ours, stock, strict=True):
        assert_same_run(our_run, stock_run, tolerance)


@pytest.mark.parametrize("name", ZOO)
def test_paged_equals_stock(name: str) -> None:
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    stock_alone = alone(model, lambda: make_prompt_cache(model))
    assert_same_runs(alone(model, factory.make_cache), stock_alone, ALONE_TOLERANCE)
    if name in STOCK_CANNOT_BATCH:
        for make_cache in (lambda: make_prompt_cache(model), factory.make_cache):
            with pytest.raises(ValueError, match=r"batching|broadcast|scalars|dimension"):
                batched(model, make_cache)
    elif name in STOCK_BATCH_DIFFERS | ONLY_PAGED_CAN_BATCH:
        assert_same_runs(batched(model, factory.make_cache), stock_alone, BATCH_TOLERANCE)
    else:
        expected = batched(model, lambda: make_prompt_cache(model))
        assert_same_runs(batched(model, factory.make_cache), expected, BATCH_TOLERANCE)
    gc.collect()
    factory.pool.check()
    assert factory.stats().blocks_used == 0
