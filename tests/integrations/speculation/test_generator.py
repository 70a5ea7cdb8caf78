"""Speculative decoding of mlx-lm on paged caches gives the same as greedy decoding on mlx-lm's."""

import dataclasses
import gc
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory
from tests.support.generation import (
    Run,
    assert_same_run,
    assert_written_and_free,
    greedy,
    speculate,
)
from tests.support.zoo import small_model

# The target verifies several draft tokens at a time, so float32 sums have another order.
TOLERANCE = 1e-3
# The page border at 256 lies among the drafted, accepted and trimmed tokens.
PROMPT_LENGTH, NEW_TOKENS = 240, 40


@dataclass
class Case:
    """A target, its prompt, the text that it writes without a draft, and drafts by their name: one
    guesses about every second token, and the other nothing."""

    model: Any
    prompt: list[int]
    greedy_run: Run
    drafts: dict[str, Any]


@pytest.fixture(scope="module")
def case(trained: Any, source_text: str) -> Case:
    model, tokenizer = trained("stdlib-llama")
    prompt = tokenizer.encode(source_text[20000:22000])[:PROMPT_LENGTH]
    assert len(prompt) == PROMPT_LENGTH
    run = greedy(model, prompt, make_prompt_cache(model), NEW_TOKENS)
    mx.random.seed(0)
    args = dataclasses.replace(model.args, num_hidden_layers=1, layer_types=None)
    random = llama.Model(dataclasses.replace(args, hidden_size=64, intermediate_size=64))
    mx.eval(random.parameters())
    return Case(model, prompt, run, {"truncated": truncated(model), "random": random})


def truncated(model: Any) -> Any:
    """All layers of the model but the last, with its embedding and norm."""
    count = model.args.num_hidden_layers - 1
    draft = llama.Model(dataclasses.replace(model.args, num_hidden_layers=count, layer_types=None))
    kept: Any = tree_flatten(draft.parameters(), destination={})
    weights: Any = tree_flatten(model.parameters(), destination={})
    draft.load_weights([(name, weights[name]) for name in kept])
    draft.eval()
    return draft


@pytest.mark.parametrize(
    ("kind", "num_draft_tokens", "is_installed"),
    [
        ("truncated", 3, False),
        pytest.param("random", 5, False, marks=pytest.mark.slow),
        pytest.param("truncated", 4, True, marks=pytest.mark.slow),
        *(pytest.param("truncated", n, False, marks=pytest.mark.soak) for n in (1, 2, 5)),
    ],
)
def test_paged_caches_give_the_greedy_run(
    kind: str, num_draft_tokens: int, is_installed: bool, case: Case
) -> None:
    draft = case.drafts[kind]
    factories = [PagedCacheFactory(each, max_bytes=64 << 20) for each in (case.model, draft)]
    target, of_draft = factories
    with target, of_draft:
        caches = None if is_installed else [*target.make_cache(), *of_draft.make_cache()]
        run, drafted = speculate(case.model, draft, case.prompt, num_draft_tokens, caches, 2048)
    assert_same_run(run, case.greedy_run, TOLERANCE)
    # A draft that is always right or always wrong would not cover every length of trimming.
    assert (0 < sum(drafted) < NEW_TOKENS) == (kind == "truncated")
    del caches
    assert_written_and_free(*factories)


@pytest.mark.parametrize("passed_in", [True, False])
def test_a_hybrid_is_refused_by_mlx_lm_and_leaks_nothing(passed_in: bool) -> None:
    model, draft = small_model("qwen3_next"), small_model("llama")
    factories = PagedCacheFactory(model), PagedCacheFactory(draft)
    with factories[0], factories[1]:
        caches = factories[0].make_cache() + factories[1].make_cache() if passed_in else None
        steps = speculative_generate_step(mx.array([1, 2, 3]), model, draft, prompt_cache=caches)
        with pytest.raises(ValueError, match="trimmable"):
            next(steps)
    del steps, caches
    gc.collect()
    for factory in factories:
        assert (factory.stats().blocks_used, factory.stats().slabs) == (0, 0)
