"""Models with sliding windows generate the same on rings of pages as on mlx-lm's caches."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from paged_kv import PagedCacheFactory
from tests.support.generation import (
    Run,
    assert_same_run,
    assert_same_runs,
    assert_written_and_free,
    greedy,
    runs_of,
    speculate,
)
from tests.support.grids import plain_cases, plain_only
from tests.support.zoo import small_model

# mlx-lm adds the sums of a long step in another order, and a batch in yet another.
TOLERANCE = 1e-3
BATCH_TOLERANCE = 2e-3
# Windows of 32 tokens live in rings of one page: these prompts wrap.
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(430)]
NEW_TOKENS = 6
STEPS = plain_only([31, 32, 33, 2048], [31, 32, 33, 2048, 16, 64])
LENGTHS = (300, 5, 430, 256)
WITH_RINGS = [
    "gemma3_text",
    "gemma3n",
    "gemma4_text",
    "gpt_oss",
    "cohere2",
    "olmo3",
    "exaone4",
    "mimo_v2_flash",
    "afmoe",
    "iquestloopcoder",
    "ministral3",
    "plamo3",
]
# mlx-lm gives these windows full caches, or chunked ones of its own.
WITHOUT_RINGS = ["smollm3", "llama4_text"]
# One with full layers between, one with shared keys, one with sinks, and one without rings.
PLAIN = ["gemma3_text", "gemma3n", "gpt_oss", "smollm3"]
# mlx-lm's own batches differ from its single runs.
BATCH_DIFFERS = {"plamo3"}


@pytest.fixture(scope="module", params=plain_only(PLAIN, [*WITH_RINGS, *WITHOUT_RINGS]))
def family(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, small_model(request.param)


def new_factory(model: Any, **options: Any) -> PagedCacheFactory:
    return PagedCacheFactory(model, max_bytes=64 << 20, **options)


def test_layers_with_a_window_get_rings(family: tuple[str, Any]) -> None:
    name, model = family
    factory = new_factory(model)
    assert bool(factory.pool.windows) == (name in WITH_RINGS)
    for window in factory.pool.windows.values():
        assert (window.size, window.write_chunk, window.sink_tokens) == (32, 32, 0)
    stock_types = [type(cache) for cache in make_prompt_cache(model)]
    paged_types = {type(cache) for cache in factory.make_cache()}
    assert (RotatingKVCache in stock_types) == (name in WITH_RINGS)
    assert not paged_types & {KVCache, RotatingKVCache}


@pytest.mark.parametrize("step", STEPS)
def test_every_prefill_step_gives_the_tokens_of_the_same_one(
    family: tuple[str, Any], step: int
) -> None:
    """Steps that are written before they are read, steps that fill a window, and steps that are too
    long."""
    _, model = family
    factory = new_factory(model)
    stock = greedy(model, PROMPT, make_prompt_cache(model), NEW_TOKENS, step)
    ours = greedy(model, PROMPT, factory.make_cache(), NEW_TOKENS, step)
    assert_same_run(ours, stock, TOLERANCE)
    assert_written_and_free(factory)


@pytest.mark.parametrize(
    "changes", plain_only([{}], [{}, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}])
)
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


def test_many_single_tokens_give_the_same_tokens(family: tuple[str, Any]) -> None:
    _, model = family
    factory = new_factory(model, write_chunk=1)
    runs = [
        greedy(model, PROMPT[:250], cache, 40, 64)
        for cache in (factory.make_cache(), make_prompt_cache(model))
    ]
    assert_same_run(runs[0], runs[1], TOLERANCE)
    assert_written_and_free(factory)


def batched(model: Any, caches: list[list[Any]]) -> list[Run]:
    """Prompts of several lengths, read in steps longer than a window."""
    generator = BatchGenerator(
        model, completion_batch_size=3, prefill_batch_size=2, prefill_step_size=100
    )
    prompts = [PROMPT[index : index + n] for index, n in enumerate(LENGTHS)]
    uids = generator.insert_segments(
        [[prompt] for prompt in prompts], caches=caches, max_tokens=[NEW_TOKENS] * len(prompts)
    )
    return runs_of(generator, uids)


def test_a_ragged_batch_gives_every_row_what_mlx_lm_gives_it(family: tuple[str, Any]) -> None:
    name, model = family
    factory = new_factory(model)
    ours = batched(model, [factory.make_cache() for _ in LENGTHS])
    if name in BATCH_DIFFERS:
        stock = batched(model, [make_prompt_cache(model) for _ in LENGTHS])
    else:
        prompts = [PROMPT[index : index + n] for index, n in enumerate(LENGTHS)]
        stock = [
            greedy(model, prompt, make_prompt_cache(model), NEW_TOKENS, 100) for prompt in prompts
        ]
    assert_same_runs(ours, stock, BATCH_TOLERANCE)
    assert_written_and_free(factory)


def test_copies_and_saved_caches_go_on_as_mlx_lms_do(
    family: tuple[str, Any], tmp_path: Path
) -> None:
    _, model = family
    factory = new_factory(model)
    ours, stock = [
        continued(model, cache, str(tmp_path / name))
        for name, cache in (
            ("ours.safetensors", factory.make_cache()),
            ("stock.safetensors", make_prompt_cache(model)),
        )
    ]
    assert_same_runs(ours, stock, TOLERANCE)
    assert_written_and_free(factory)


def continued(model: Any, cache: list[Any], file: str) -> list[Run]:
    """Alternates the runs of a cache, of two copies and of two loaded caches."""
    greedy(model, PROMPT[:350], cache, 1, 64)
    copies = copy.deepcopy(cache), copy.deepcopy(cache)
    save_prompt_cache(file, cache)
    caches = [cache, *copies, load_prompt_cache(file), load_prompt_cache(file)]
    runs = [
        greedy(model, PROMPT[9 * index :][:40], each, 3, 33) for index, each in enumerate(caches)
    ]
    return runs + [
        greedy(model, PROMPT[5 * index :][:3], each, 3) for index, each in enumerate(caches)
    ]


@pytest.fixture(scope="module")
def code(trained: Any, source_text: str) -> tuple[Any, list[int]]:
    """A trained model with windows of 256 tokens, and a prompt of three of them."""
    model, tokenizer = trained("stdlib-gemma3")
    tokens = tokenizer.encode(source_text[20000:26000])[:800]
    assert len(tokens) == 800
    return model, tokens


@pytest.mark.parametrize(
    ("step", "write_chunk"),
    plain_cases([(256, 64)], [(100, None), (256, 64), (257, None), (2048, 1)]),
)
def test_a_trained_model_writes_the_same_text(
    step: int, write_chunk: int | None, code: tuple[Any, list[int]]
) -> None:
    model, prompt = code
    factory = new_factory(model, write_chunk=write_chunk)
    stock = greedy(model, prompt, make_prompt_cache(model), 24, step)
    assert_same_run(greedy(model, prompt, factory.make_cache(), 24, step), stock, TOLERANCE)
    assert factory.stats().gather_fallbacks == 0
    assert_written_and_free(factory)


def truncated(model: Any, num_layers: int) -> Any:
    """The model's first layers, with its embedding and norm."""
    draft = gemma3_text.Model(copy.copy(model.args))
    draft.model.layers = draft.model.layers[:num_layers]
    draft.model.num_hidden_layers = draft.args.num_hidden_layers = num_layers
    if model.tie_word_embeddings:
        draft.tie_word_embeddings = True
        draft.pop("lm_head")
    kept: Any = tree_flatten(draft.parameters(), destination={})
    weights: Any = tree_flatten(model.parameters(), destination={})
    draft.load_weights([(name, weights[name]) for name in kept])
    draft.eval()
    return draft


@pytest.mark.parametrize("drafted", plain_only([3], [1, 3, 6]))
def test_speculation_behind_the_window_equals_greedy_decoding(
    drafted: int, code: tuple[Any, list[int]]
) -> None:
    """mlx-lm's rotating caches cannot be trimmed after they have wrapped, and say so."""
    model, prompt = code
    draft = truncated(model, 5)
    plain = greedy(model, prompt, make_prompt_cache(model), 40)
    factories = new_factory(model), new_factory(draft)
    caches = [cache for factory in factories for cache in factory.make_cache()]
    run, _ = speculate(model, draft, prompt, drafted, caches, 128)
    assert_same_run(run, plain, TOLERANCE)
    assert all(cache.is_trimmable() for cache in caches)
    del caches
    assert_written_and_free(*factories)


def test_mlx_lm_refuses_to_speculate_behind_the_window_on_its_own_caches(
    code: tuple[Any, list[int]],
) -> None:
    model, prompt = code
    draft = truncated(model, 5)
    caches = [*make_prompt_cache(model), *make_prompt_cache(draft)]
    greedy(model, prompt, caches[:6], 1)
    greedy(draft, prompt, caches[6:], 1)
    with pytest.raises(ValueError, match="trimmable"):
        speculate(model, draft, prompt[:5], 2, caches, 128)


@pytest.mark.parametrize("drafted", [2, 5])
def test_a_small_model_drafts_for_itself_around_the_ring(drafted: int) -> None:
    """Windows of 32 in rings of one page: the 40 tokens lie where the page wraps."""
    model = small_model("gemma3_text")
    plain = greedy(model, PROMPT[:240], make_prompt_cache(model), 40)
    factory = new_factory(model)
    caches = factory.make_cache() + factory.make_cache()
    run, _ = speculate(model, model, PROMPT[:240], drafted, caches, 128)
    assert_same_run(run, plain, TOLERANCE)
    del caches
    assert_written_and_free(factory)


def test_a_draft_longer_than_the_ring_can_take_back_is_said_to_be() -> None:
    model = small_model("gemma3_text")
    cache = new_factory(model).make_cache()
    greedy(model, PROMPT, cache, 1)
    possible = cache[0].pool.windows[0].capacity - 31
    assert [layer.can_trim(possible) for layer in cache] == [True] * len(cache)
    assert [layer.can_trim(possible + 1) for layer in cache] == [False] * len(cache)
    del cache
    gc.collect()
