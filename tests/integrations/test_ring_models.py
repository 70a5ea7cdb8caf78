"""Models with sliding windows generate the same on rings of pages as on mlx-lm's caches."""

import copy
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedCacheFactory
from tests.support.generation import assert_same_run, assert_written_and_free, greedy, speculate
from tests.support.grids import plain_only
from tests.support.zoo import small_model

# mlx-lm adds the sums of a long step in another order.
TOLERANCE = 1e-3
# Windows of 32 tokens live in rings of one page: these prompts wrap.
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(330)]
NEW_TOKENS = 4


def new_factory(model: Any, **options: Any) -> PagedCacheFactory:
    return PagedCacheFactory(model, max_bytes=64 << 20, **options)


@pytest.mark.parametrize(
    "name",
    plain_only(
        ["gemma3_text"],
        ["gemma3_text", "gpt_oss", "gemma4_text", "mimo_v2_flash", "plamo3", "llama4_text"],
    ),
)
def test_every_prefill_step_gives_the_tokens_of_the_same_one(name: str) -> None:
    """Steps that are written before they are read, steps that fill a window, and steps that are too
    long; and however much is written at once."""
    model = small_model(name)
    for step, write_chunk in ((32, None), (33, 1), (2048, 16)):
        factory = new_factory(model, write_chunk=write_chunk)
        stock = greedy(model, PROMPT, make_prompt_cache(model), NEW_TOKENS, step)
        ours = greedy(model, PROMPT, factory.make_cache(), NEW_TOKENS, step)
        assert_same_run(ours, stock, TOLERANCE)
        assert_written_and_free(factory)


@pytest.mark.parametrize(
    "changes", plain_only([{}], [{}, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}])
)
@pytest.mark.slow
def test_full_layers_with_heads_of_512_give_the_same_tokens(changes: dict[str, Any]) -> None:
    """As Gemma 4 has them, with and without values that are the keys."""
    model: Any = small_model("gemma4_text", global_head_dim=512, **changes)
    factory = new_factory(model)
    stock = greedy(model, PROMPT, make_prompt_cache(model), NEW_TOKENS, 64)
    ours = greedy(model, PROMPT, factory.make_cache(), NEW_TOKENS, 64)
    assert_same_run(ours, stock, TOLERANCE)
    stats = factory.stats()
    assert (stats.gather_fallbacks, stats.kernel_fallbacks) == (0, 0)
    assert_written_and_free(factory)


@pytest.mark.slow
def test_speculation_behind_the_window_equals_greedy_decoding() -> None:
    """Windows of 32 in rings of one page: the 40 tokens lie where the page wraps. mlx-lm's rotating
    caches cannot be trimmed then. The draft is the model without its last layer, so it guesses some
    tokens right."""
    model = small_model("gemma3_text")
    draft: Any = copy.deepcopy(model)
    draft.model.layers = draft.model.layers[:-1]
    draft.args.num_hidden_layers = draft.model.num_hidden_layers = len(draft.model.layers)
    prompt = PROMPT[:240]
    plain = greedy(model, prompt, make_prompt_cache(model), 40)
    factories = new_factory(model), new_factory(draft)
    caches = [cache for factory in factories for cache in factory.make_cache()]
    run, from_draft = speculate(model, draft, prompt, 4, caches, 128)
    assert_same_run(run, plain, TOLERANCE)
    assert not all(from_draft)
    assert all(cache.is_trimmable() for cache in caches)
    del caches
    assert_written_and_free(*factories)
