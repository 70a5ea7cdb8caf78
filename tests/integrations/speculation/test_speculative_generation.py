"""Speculative decoding on paged caches generates the same as greedy decoding on mlx-lm's."""

import dataclasses
import gc
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory
from tests.support.generation import Run, assert_same_run, assert_written_and_free, greedy
from tests.support.grids import plain_only
from tests.support.zoo import small_model

# The target verifies several draft tokens at a time, so float32 sums have another order.
FLOAT32_TOLERANCE = 1e-3
# The page border at 256 lies among the drafted, accepted and trimmed tokens.
PROMPT_LENGTH = 240
NEW_TOKENS = 40


@dataclass
class Case:
    """A target, its prompt, and the text that it writes without a draft."""

    model: Any
    prompt: list[int]
    greedy_run: Run


@pytest.fixture(scope="module")
def case(trained: Any, source_text: str) -> Case:
    model, tokenizer = trained("stdlib-llama")
    prompt = tokenizer.encode(source_text[20000:22000])[:PROMPT_LENGTH]
    assert len(prompt) == PROMPT_LENGTH
    run = greedy(model, prompt, make_prompt_cache(model), NEW_TOKENS)
    return Case(model, prompt, run)


@pytest.fixture(scope="module")
def truncated_draft(case: Case) -> Any:
    """All layers of the target but the last: it guesses about every second token."""
    return truncated(case.model, case.model.args.num_hidden_layers - 1)


@pytest.fixture(scope="module")
def random_draft(case: Case) -> Any:
    """It guesses nothing, so the target trims every draft."""
    mx.random.seed(0)
    args = dataclasses.replace(case.model.args, num_hidden_layers=1, layer_types=None)
    draft = llama.Model(dataclasses.replace(args, hidden_size=64, intermediate_size=64))
    mx.eval(draft.parameters())
    return draft


def truncated(model: Any, num_layers: int) -> Any:
    """The model's first layers, with its embedding and norm."""
    args = dataclasses.replace(model.args, num_hidden_layers=num_layers, layer_types=None)
    draft = llama.Model(args)
    kept: Any = tree_flatten(draft.parameters(), destination={})
    weights: Any = tree_flatten(model.parameters(), destination={})
    draft.load_weights([(name, weights[name]) for name in kept])
    draft.eval()
    return draft


def speculate(case: Case, draft: Any, **options: Any) -> tuple[Run, int]:
    """A run, and the number of its tokens that the draft guessed."""
    produced = list(
        speculative_generate_step(
            mx.array(case.prompt), case.model, draft, max_tokens=NEW_TOKENS, **options
        )
    )
    run = Run([int(token) for token, _, _ in produced], mx.stack([row for _, row, _ in produced]))
    return run, sum(from_draft for _, _, from_draft in produced)


def factories_of(case: Case, draft: Any) -> tuple[PagedCacheFactory, PagedCacheFactory]:
    return (
        PagedCacheFactory(case.model, max_bytes=64 << 20),
        PagedCacheFactory(draft, max_bytes=64 << 20),
    )


@pytest.mark.parametrize(
    ("kind", "guesses", "num_draft_tokens"),
    [
        ("truncated", True, 3),
        *(pytest.param("truncated", True, n, marks=pytest.mark.slow) for n in (1, 2, 4, 5)),
        ("random", False, 5),
        pytest.param("random", False, 1, marks=pytest.mark.slow),
    ],
)
def test_caches_that_are_passed_in_give_the_greedy_run(
    kind: str, guesses: bool, num_draft_tokens: int, case: Case, request: pytest.FixtureRequest
) -> None:
    draft = request.getfixturevalue(f"{kind}_draft")
    factories = factories_of(case, draft)
    caches = [factory.make_cache() for factory in factories]
    run, guessed = speculate(
        case, draft, num_draft_tokens=num_draft_tokens, prompt_cache=caches[0] + caches[1]
    )
    assert_same_run(run, case.greedy_run, FLOAT32_TOLERANCE)
    # A draft that is always right or always wrong would not cover every length of trimming.
    assert (0 < guessed < NEW_TOKENS) == guesses
    assert caches[0][0].pool.stats().blocks_used == 2
    del caches
    assert_written_and_free(*factories)


@pytest.mark.parametrize("num_draft_tokens", plain_only([4], [2, 4]))
def test_installed_factories_of_target_and_draft_give_the_greedy_run(
    num_draft_tokens: int, case: Case, truncated_draft: Any
) -> None:
    factories = factories_of(case, truncated_draft)
    with ExitStack() as installed:
        for factory in factories:
            installed.enter_context(factory)
        run, _ = speculate(case, truncated_draft, num_draft_tokens=num_draft_tokens)
    assert_same_run(run, case.greedy_run, FLOAT32_TOLERANCE)
    assert_written_and_free(*factories)


def test_a_model_can_draft_for_itself_out_of_one_pool(case: Case) -> None:
    """The target accepts everything, and the two sequences interleave their blocks."""
    factory = PagedCacheFactory(case.model, max_bytes=64 << 20)
    with factory:
        run, guessed = speculate(case, case.model, num_draft_tokens=3)
    assert_same_run(run, case.greedy_run, FLOAT32_TOLERANCE)
    assert guessed >= NEW_TOKENS * 3 // 4
    assert_written_and_free(factory)


@pytest.mark.parametrize("taken", plain_only([9], [1, 9]))
def test_a_run_that_is_abandoned_leaves_caches_where_mlx_lm_leaves_its_own(
    taken: int, case: Case, truncated_draft: Any
) -> None:
    factories = factories_of(case, truncated_draft)
    ours = [cache for factory in factories for cache in factory.make_cache()]
    stock = [*make_prompt_cache(case.model), *make_prompt_cache(truncated_draft)]
    for caches in (ours, stock):
        abandon(case, truncated_draft, caches, taken)
    assert [cache.offset for cache in ours] == [cache.offset for cache in stock]
    del ours, caches
    assert_written_and_free(*factories)


def abandon(case: Case, draft: Any, caches: list[Any], taken: int) -> None:
    steps = speculative_generate_step(
        mx.array(case.prompt), case.model, draft, num_draft_tokens=5, prompt_cache=caches
    )
    for _ in range(taken):
        next(steps)
    steps.close()


def test_what_is_kept_after_trimming_continues_as_greedy_decoding_does(
    case: Case, truncated_draft: Any
) -> None:
    """A cache that was trimmed many times holds exactly the accepted tokens."""
    cache = PagedCacheFactory(case.model, max_bytes=64 << 20).make_cache()
    draft_cache = make_prompt_cache(truncated_draft)
    produced, _ = speculate(
        case, truncated_draft, num_draft_tokens=5, prompt_cache=cache + draft_cache
    )
    read = [*case.prompt, *produced.tokens]
    rest = [*read[cache[0].offset :], *case.prompt[:5]]
    stock_cache = make_prompt_cache(case.model)
    case.model(mx.array([read[: cache[0].offset]]), cache=stock_cache)
    stock = greedy(case.model, rest, stock_cache, 8)
    assert_same_run(greedy(case.model, rest, cache, 8), stock, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("passed_in", [True, False])
def test_a_hybrid_is_refused_by_mlx_lm_and_leaks_nothing(passed_in: bool) -> None:
    model, draft = small_model("qwen3_next"), small_model("llama")
    factories = PagedCacheFactory(model), PagedCacheFactory(draft)
    with factories[0], factories[1]:
        caches = factories[0].make_cache() + factories[1].make_cache() if passed_in else None
        steps = speculative_generate_step(mx.array([1, 2, 3]), model, draft, prompt_cache=caches)
        with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
            next(steps)
    del steps, caches
    gc.collect()
    for factory in factories:
        assert (factory.stats().blocks_used, factory.stats().slabs) == (0, 0)
