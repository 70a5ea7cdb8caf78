"""Every model file of mlx-lm that can be built small: alone and in a batch, paged and stock."""

from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory, SpeculativeBatchGenerator
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from tests.support.drafts import PlannedDraft
from tests.support.generation import (
    Run,
    assert_nothing_is_used,
    assert_same_run,
    assert_same_runs,
    greedy,
    runs_of,
)
from tests.support.zoo import ZOO, small_model

# Where a kernel computes attention, float32 sums have another order, carried through random layers.
# Near ties among random weights lie closer than this.
TOLERANCE = 1e-4
# A sequence that joins a running batch gets zeros for the states that it has not yet. For
# recurrent_gemma no state is something else: its first token is not scaled.
ZEROS_ARE_A_STATE = {"recurrent_gemma": 0.1}
# Their own batches differ from their prompts alone where a longer sequence joins.
BATCH_DIFFERS = {"afm7", "minimax_m3_vl"}
LENGTHS = (3, 70, 1)
RAGGED = [[(7 * i * i + 3 * i + 1 + k) % 97 for i in range(n)] for k, n in enumerate(LENGTHS)]
NEW_TOKENS = 4
STEP = 24


def batched(model: Any, make_cache: Callable[[], Any]) -> list[Run]:
    """Two sequences, which the third joins."""
    generator = BatchGenerator(
        model, max_tokens=NEW_TOKENS, prefill_step_size=STEP, completion_batch_size=2
    )
    caches = [make_cache() for _ in RAGGED]
    return runs_of(generator, generator.insert([list(each) for each in RAGGED], caches=caches))


# Models with recurrent layers of each kind.
RECURRENT = [
    *("baichuan_m1", "bailing_hybrid", "falcon_h1", "lfm2", "longcat_flash_ngram", "mamba"),
    *("mamba2", "plamo2", "qwen3_next", "recurrent_gemma", "rwkv7"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_ragged_drafts_leave_recurrent_states_alone(name: str) -> None:
    """Rows of one step have unequal numbers of drafted tokens, some of them wrong."""
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    texts = [
        [*prompt, *greedy(model, prompt, make_prompt_cache(model), 20).tokens] for prompt in RAGGED
    ]
    draft = PlannedDraft(texts, lengths=(0, 3, 1, 4, 2), wrong_every=5)
    generator = SpeculativeBatchGenerator(
        model, draft, lengths=FixedLengths(), max_tokens=12, prefill_step_size=STEP
    )
    uids = generator.insert(RAGGED, caches=[factory.make_cache() for _ in RAGGED])
    for run, text, prompt in zip(runs_of(generator, uids), texts, RAGGED, strict=True):
        assert run.tokens == text[len(prompt) : len(prompt) + 12]


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

    expected = [greedy(model, prompt, stock(), NEW_TOKENS, STEP) for prompt in RAGGED]
    ours = greedy(model, RAGGED[1], factory.make_cache(), NEW_TOKENS, STEP)
    assert_same_run(ours, expected[1], TOLERANCE)
    if name in BATCH_DIFFERS:
        expected = batched(model, stock)
    runs = batched(model, factory.make_cache)
    assert_same_runs(runs, expected, ZEROS_ARE_A_STATE.get(name, TOLERANCE))
    assert_nothing_is_used(factory)
