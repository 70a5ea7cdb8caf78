"""Every model file of mlx-lm that can be built small: alone and in a batch, paged and stock."""

from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory
from tests.generation import Run, assert_nothing_is_used, assert_same_runs, greedy, runs_of
from tests.zoo import ZOO, small_model

# Where a kernel computes attention, float32 sums have another order, carried through random layers.
# Near ties among random weights lie closer than this.
ALONE_TOLERANCE = 1e-4
BATCH_TOLERANCE = 1e-4
# Model files that mlx-lm cannot batch with its own caches, by the error.
STOCK_CANNOT_BATCH = {"deepseek_v41", "gpt_bigcode", "llama4", "phi3small"}
# Padding enters their recurrent states, with mlx-lm's caches too: a sequence of a batch depends on
# its padding. Two prompts of one length, read together, do not.
PADDING_LEAKS = {"baichuan_m1", "bailing_moe_linear", "jamba", "olmo_hybrid", "recurrent_gemma"}
# nemotron-nas's configuration has a layer without attention, which mlx-lm's own batch does not
# support. gemma2 gives a batch's mask no axis for grouped queries.
ONLY_PAGED_CAN_BATCH = {"nemotron-nas", "gemma2"}
LENGTHS = (3, 70, 1, 40)
RAGGED = [[(7 * i * i + 3 * i + 1 + k) % 97 for i in range(n)] for k, n in enumerate(LENGTHS)]
EVEN = [RAGGED[1][k : k + 40] for k in range(2)]
NEW_TOKENS = 5


def batched(model: Any, make_cache: Callable[[], Any], prompts: list[list[int]]) -> list[Run]:
    generator = BatchGenerator(
        model,
        max_tokens=NEW_TOKENS,
        prefill_step_size=16,
        completion_batch_size=3,
        prefill_batch_size=2,
    )
    uids = generator.insert([list(p) for p in prompts], caches=[make_cache() for _ in prompts])
    return runs_of(generator, uids)


def alone(model: Any, make_cache: Callable[[], Any], prompts: list[list[int]]) -> list[Run]:
    return [greedy(model, prompt, make_cache(), NEW_TOKENS, 16) for prompt in prompts]


# The plain run has one family of each kind: tests/test_model_families.py and
# tests/test_batch_generation.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_paged_equals_stock(name: str) -> None:
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    prompts = EVEN if name in PADDING_LEAKS else RAGGED

    def stock() -> list[Any]:
        return make_prompt_cache(model)

    stock_alone = alone(model, stock, prompts)
    assert_same_runs(alone(model, factory.make_cache, prompts), stock_alone, ALONE_TOLERANCE)
    if name in STOCK_CANNOT_BATCH:
        for make_cache in (stock, factory.make_cache):
            with pytest.raises(ValueError, match=r"batching|broadcast|scalars|dimension"):
                batched(model, make_cache, prompts)
    else:
        expected = stock_alone if name in ONLY_PAGED_CAN_BATCH else batched(model, stock, prompts)
        assert_same_runs(batched(model, factory.make_cache, prompts), expected, BATCH_TOLERANCE)
    assert_nothing_is_used(factory)
