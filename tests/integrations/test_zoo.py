"""Every model file of mlx-lm that can be built small: alone and in a batch, paged and stock."""

from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory, SpeculativeBatchGenerator
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from tests.support.drafts import PlannedDraft
from tests.support.generation import Run, assert_nothing_is_used, assert_same_runs, greedy, runs_of
from tests.support.zoo import ZOO, small_model

# Where a kernel computes attention, float32 sums have another order, carried through random layers.
# Near ties among random weights lie closer than this.
ALONE_TOLERANCE = 1e-4
BATCH_TOLERANCE = 1e-4
# A sequence that joins a running batch gets zeros for the states that it has not yet. For
# recurrent_gemma no state is something else: its first token is not scaled.
ZEROS_ARE_A_STATE = {"recurrent_gemma": 0.1}
# Their own batches differ from their prompts alone where a longer sequence joins.
BATCH_DIFFERS = {"afm7", "minimax_m3_vl"}
LENGTHS = (3, 70, 1, 40)
RAGGED = [[(7 * i * i + 3 * i + 1 + k) % 97 for i in range(n)] for k, n in enumerate(LENGTHS)]
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


# Models with recurrent layers.
RECURRENT = [
    *("baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1", "gear"),
    *("granitemoehybrid", "jamba", "kimi_k3", "kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe"),
    *("longcat_flash_ngram", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "plamo2"),
    *("prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv7"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_ragged_drafts_leave_recurrent_states_alone(name: str) -> None:
    """Rows of one step have unequal numbers of drafted tokens, some of them wrong."""
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    texts = [
        [*prompt, *greedy(model, prompt, make_prompt_cache(model), 40).tokens]
        for prompt in RAGGED[:3]
    ]
    draft = PlannedDraft(texts, lengths=(0, 3, 1, 4, 2), wrong_every=5)
    generator = SpeculativeBatchGenerator(
        model, draft, lengths=FixedLengths(), max_tokens=24, prefill_step_size=16
    )
    uids = generator.insert(RAGGED[:3], caches=[factory.make_cache() for _ in range(3)])
    for run, text, prompt in zip(runs_of(generator, uids), texts, RAGGED, strict=False):
        assert run.tokens == text[len(prompt) : len(prompt) + 24]


# The plain run has one family of each kind: tests/integrations/test_model_families.py and
# tests/integrations/batching/test_batch_generation.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_paged_equals_stock(name: str) -> None:
    """A sequence of a ragged batch has the tokens of its prompt alone: also in models whose
    recurrent states take in the padding of mlx-lm's own batches."""
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=64 << 20)

    def stock() -> list[Any]:
        return make_prompt_cache(model)

    expected = alone(model, stock, RAGGED)
    assert_same_runs(alone(model, factory.make_cache, RAGGED), expected, ALONE_TOLERANCE)
    if name in BATCH_DIFFERS:
        expected = batched(model, stock, RAGGED)
    ours = batched(model, factory.make_cache, RAGGED)
    assert_same_runs(ours, expected, ZEROS_ARE_A_STATE.get(name, BATCH_TOLERANCE))
    assert_nothing_is_used(factory)
