"""mlx-lm on quantised pages attends to the same numbers as on a contiguous cache of them."""

import copy
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import batch_generate
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.page_format import FormatName
from tests.support.folders import ROOT
from tests.support.followed_caches import FollowedCache, farthest, followed_caches
from tests.support.generation import (
    assert_nothing_is_used,
    assert_same_run,
    assert_written_and_free,
    greedy,
    speculate,
)
from tests.support.grids import plain_cases, plain_only
from tests.support.zoo import small_model

FORMATS: list[FormatName] = ["q8", "q4", ("q8", "q4"), ("fp16", "q4")]
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(430)]
NEW_TOKENS = 4


def new_factory(model: Any, page_format: FormatName) -> PagedCacheFactory:
    return PagedCacheFactory(model, page_format=page_format, max_bytes=64 << 20)


@pytest.fixture(scope="module")
def code(trained: Any, source_text: str) -> list[int]:
    tokens: list[int] = trained("stdlib-llama")[1].encode(source_text[20000:24000])
    return tokens


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["stdlib-llama", "stdlib-gemma3"])
def test_a_trained_model_on_real_text(
    name: str, page_format: FormatName, trained: Any, source_text: str
) -> None:
    """The prompt is longer than gemma's window of 256 tokens, and its steps begin anywhere."""
    model, tokenizer = trained(name)
    prompt = tokenizer.encode(source_text[20000:26000])[:500]
    factory = new_factory(model, page_format)
    distances: list[mx.array] = []
    cache = followed_caches(model, factory, page_format, distances)
    run = greedy(model, prompt, cache, NEW_TOKENS, 190)
    assert farthest(distances) <= (0 if factory.pool.backend.name == "plain" else 1)
    # Looking at the arrays changes nothing.
    assert_same_run(greedy(model, prompt, factory.make_cache(), NEW_TOKENS, 190), run, 0.0)
    assert factory.stats().gather_fallbacks == 0
    del cache
    assert_written_and_free(factory)


@pytest.mark.parametrize("step", plain_only([300], [2048, 300]))
def test_a_step_longer_than_a_window_is_attended_to_before_it_is_quantised(
    step: int, trained: Any, source_text: str
) -> None:
    model, tokenizer = trained("stdlib-gemma3")
    prompt = tokenizer.encode(source_text[20000:26000])[:700]
    distances: list[mx.array] = []
    cache = followed_caches(model, new_factory(model, "q4"), "q4", distances)
    greedy(model, prompt, cache, NEW_TOKENS, step)
    assert farthest(distances) <= 1


@pytest.mark.parametrize("page_format", ["q8", "q4"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *product(("llama", "gemma3_text"), (mx.float32, mx.float16, mx.bfloat16)),
        ("gpt_oss", mx.float32),  # Its experts run in float32 only on MLX's CPU backend.
        *product(("stablelm", "plamo"), (mx.float32,)),  # They cast and tile keys.
    ],
)
def test_small_models_of_every_dtype(
    name: str, page_format: FormatName, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 32 tokens in rings of one page, and the sinks of gpt_oss.

    In 16 bits the plain backend attends with MLX's own attention, so nothing may differ;
    tests/kernels/test_backend_formats.py compares the native one's.
    """
    if dtype != mx.float32:
        monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
    model: Any = small_model(name)
    model.set_dtype(dtype)
    factory = new_factory(model, page_format)
    distances: list[mx.array] = []
    cache = followed_caches(model, factory, page_format, distances)
    greedy(model, PROMPT, cache, NEW_TOKENS, 32)
    assert farthest(distances) <= (1 if dtype == mx.float32 else 0)
    del cache
    assert_written_and_free(factory)


@pytest.mark.parametrize(
    ("name", "page_format"),
    plain_cases(
        [("stdlib-gemma3", ("q8", "q4"))],
        [("stdlib-llama", "q4"), ("stdlib-gemma3", ("q8", "q4"))],
    ),
)
def test_a_ragged_batch_gives_every_row_what_it_gets_alone(
    name: str, page_format: FormatName, trained: Any, source_text: str
) -> None:
    """batch_generate merges, pads, extends and filters. The extracted caches continue alone."""
    model, tokenizer = trained(name)
    tokens = tokenizer.encode(source_text[20000:26000])
    prompts = [tokens[7 * i :][:n] for i, n in enumerate((300, 1, 255, 40))]
    factory = new_factory(model, page_format)
    distances: list[mx.array] = []
    response: Any = batch_generate(
        model,
        tokenizer,
        prompts,
        prompt_caches=[followed_caches(model, factory, page_format, distances) for _ in prompts],
        max_tokens=[5, 9, 7, 9],
        completion_batch_size=3,
        prefill_batch_size=2,
        prefill_step_size=128,
        return_prompt_caches=True,
    )
    assert farthest(distances) <= 1
    for prompt, text, cache in zip(prompts, response.texts, response.caches, strict=True):
        assert text
        read = len(prompt) + len(tokenizer.encode(text))
        assert {layer.oracles[0].offset for layer in cache} == {layer.offset for layer in cache}
        assert cache[0].offset == pytest.approx(read, abs=1)
        distances.clear()
        greedy(model, tokens[400:420], cache, 3)
        assert farthest(distances) <= 1
    del response, cache
    assert_written_and_free(factory)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_merged_rows_are_extended_filtered_and_extracted(name: str) -> None:
    """Every sequence decodes the same in one batch after the other as alone."""
    model: Any = small_model(name)
    factory = new_factory(model, "q4")
    distances: list[mx.array] = []
    rows = [PROMPT[:300], PROMPT[100:130], PROMPT[5:262]]
    caches = [followed_caches(model, factory, "q4", distances) for _ in rows]
    for row, cache in zip(rows, caches, strict=True):
        greedy(model, row, cache, 1, 32)

    def assert_step(layers: list[FollowedCache], tokens: list[int]) -> None:
        distances.clear()
        mx.eval(model(mx.array(tokens)[:, None], cache=layers), distances)
        assert len(distances) == 3 * len(layers) * len(tokens)
        assert farthest(distances) <= 1

    batch = [FollowedCache.merge(list(layers)) for layers in zip(*caches[:2], strict=True)]
    for layer, more in zip(batch, copy.deepcopy(caches[2]), strict=True):
        layer.extend(more)
    assert_step(batch, [3, 5, 7])
    for layer in batch:
        layer.filter([2, 0])
    assert_step(batch, [11, 13])
    alone = [layer.extract(1) for layer in batch]
    assert_step(alone, [17])
    assert_step(batch, [19, 19])
    # The merged caches are unchanged.
    assert_step(caches[1], [23])
    del caches, batch, alone, layer, more, cache
    assert_nothing_is_used(factory)


@pytest.mark.parametrize("page_format", ["q4", ("fp16", "q8")], ids=str)
def test_forks_copy_what_they_write(page_format: FormatName, trained: Any, code: list[int]) -> None:
    model, _ = trained("stdlib-llama")
    factory = new_factory(model, page_format)
    distances: list[mx.array] = []
    cache = followed_caches(model, factory, page_format, distances)
    greedy(model, code[:300], cache, 1)
    forks = [copy.deepcopy(cache) for _ in range(2)]
    assert factory.stats().blocks_used == 2
    for at, fork in enumerate(forks):
        greedy(model, code[320 + at :][:30], fork, 4)
    greedy(model, code[350:355], cache, 4)
    assert farthest(distances) <= 1
    # All three share the full block. Two forks have copied the other one.
    stats = factory.stats()
    assert (stats.blocks_used, stats.blocks_shared, stats.cow_copies) == (4, 1, 2)


@pytest.mark.parametrize("page_format", plain_only(["q4"], ["q4", ("q8", "q4")]), ids=str)
def test_rows_are_trimmed_and_written_again(
    page_format: FormatName, trained: Any, code: list[int]
) -> None:
    """Trim back into an earlier page, and within one: other slots of the page keep their
    contents."""
    model, _ = trained("stdlib-llama")
    distances: list[mx.array] = []
    cache = followed_caches(model, new_factory(model, page_format), page_format, distances)
    greedy(model, code[:520], cache, 1)
    for back, more in ((300, 50), (10, 3), (1, 1), (40, 300)):
        assert [layer.trim(back) for layer in cache] == [back] * len(cache)
        greedy(model, code[100 : 100 + more], cache, 3)
        assert farthest(distances) <= 1


CONTINUE_ELSEWHERE = """
import sys
from mlx_lm.models.cache import load_prompt_cache
from paged_kv import PagedCacheFactory
from tests.support.generation import greedy
from tests.support.zoo import small_model

model = small_model(sys.argv[1])
keys, values = sys.argv[3].split("/")
factory = PagedCacheFactory(model, page_format=(keys, values), max_bytes=1 << 26)
cache = load_prompt_cache(sys.argv[2])
print(greedy(model, [5, 6, 7], cache, 8).tokens)
print(factory.stats().blocks_by_format)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "page_format"), [("llama", "q4/q4"), ("gemma3_text", "q8/q4")])
def test_a_saved_cache_goes_on_in_a_fresh_process(
    name: str, page_format: str, tmp_path: Path
) -> None:
    model: Any = small_model(name)
    factory = new_factory(model, page_format)
    cache = factory.make_cache()
    greedy(model, PROMPT, cache, 1, 32)
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, cache)
    run = greedy(model, [5, 6, 7], cache, 8)
    # Load into another pool of this process, which was made later.
    other = new_factory(model, page_format)
    loaded = load_prompt_cache(file)
    assert loaded[0].pool is other.pool
    assert_same_run(greedy(model, [5, 6, 7], loaded, 8), run, 0.0)
    command = [sys.executable, "-c", CONTINUE_ELSEWHERE, name, file, page_format]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [str(run.tokens), str(factory.stats().blocks_by_format)]


def draft_of(model: Any) -> Any:
    """The draft has all layers of the model but the last: it guesses some tokens right."""
    draft = copy.deepcopy(model)
    draft.model.layers = draft.model.layers[:-1]
    draft.args.num_hidden_layers = draft.model.num_hidden_layers = len(draft.model.layers)
    return draft


@pytest.mark.parametrize(
    ("name", "drafted"),
    plain_cases([("stdlib-gemma3", 4)], [("stdlib-llama", 1), ("stdlib-gemma3", 4)]),
)
def test_speculation_trims_what_was_guessed_wrong(
    name: str, drafted: int, trained: Any, source_text: str
) -> None:
    """The 40 tokens lie around a page border, and beyond gemma's window."""
    model, tokenizer = trained(name)
    tokens = tokenizer.encode(source_text[20000:26000])
    prompt = tokens[: 240 if name == "stdlib-llama" else 500]
    draft = draft_of(model)
    distances: list[mx.array] = []
    factories = new_factory(model, "q4"), new_factory(draft, "q4")
    caches = [
        layer
        for each, factory in zip((model, draft), factories, strict=True)
        for layer in followed_caches(each, factory, "q4", distances)
    ]
    _, from_draft = speculate(model, draft, prompt, drafted, caches, 190)
    assert farthest(distances) <= 1
    assert any(from_draft)
    assert not all(from_draft)
    del caches
    assert_written_and_free(*factories)
