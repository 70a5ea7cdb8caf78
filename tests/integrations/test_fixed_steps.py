"""A reproducible factory gives the same request the same bits, whatever else is there."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from paged_kv import NGramDraft, NotReproducible, PagedCacheFactory
from paged_kv.integrations import fixed_steps, trials
from paged_kv.integrations.speculation.generator import SpeculativeBatchGenerator
from paged_kv.kernels.pages.backend import Backend
from tests.support.generation import assert_written_and_free, runs_of
from tests.support.grids import plain_cases
from tests.support.schedules import CASES, Schedules, prompt
from tests.support.zoo import small_model

LARGE = 256 << 20
OFTEN = [
    ("gemma3_text", mx.bfloat16, "fp16"),
    ("plamo2", mx.bfloat16, "q4"),
    ("deepseek_v3", mx.float32, "fp16"),
]


def test_no_schedule_changes_a_bit(tmp_path: Path) -> None:
    found = Schedules("qwen3", mx.float32, "fp16", tmp_path, reproducible=True).run(8)
    assert found.differing == 0 < min(found.hits, found.preemptions)


@pytest.mark.slow
def test_without_it_schedules_change_bits(tmp_path: Path) -> None:
    schedules = Schedules("qwen3", mx.float32, "fp16", tmp_path, reproducible=False)
    assert schedules.run(8).differing > 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "page_format"), plain_cases(OFTEN, CASES), ids=str)
def test_no_kind_of_model_changes_a_bit(
    tmp_path: Path, kind: str, dtype: mx.Dtype, page_format: str
) -> None:
    schedules = Schedules(kind, dtype, page_format, tmp_path, reproducible=True)
    found = schedules.run(10)
    assert found.differing == 0 < found.hits


def test_only_what_was_computed_as_a_prompt_is_found() -> None:
    model = small_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes=LARGE, reproducible=True)
    tokens, prompt_cache = prompt(600), factory.make_cache()
    model(mx.array([tokens[:300]]), cache=prompt_cache)
    for token in tokens[300:]:
        model(mx.array([[token]]), cache=prompt_cache)
    assert factory.insert_cache(tokens, prompt_cache) == 256
    _, cached = factory.fetch_cache(tokens)
    assert cached == 256


@pytest.mark.parametrize("place", ["before the step", "after it"])
def test_a_call_that_fails_within_a_prompt_changes_nothing(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = small_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes=LARGE, reproducible=True)
    prompt_cache = factory.make_cache()
    model(mx.array([prompt(256)]), cache=prompt_cache)
    body = type(model.model)
    stock, calls = body.__call__, []

    def fails_later(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and place == "before the step":
            raise KeyboardInterrupt
        found = stock(*arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(body, "__call__", fails_later)
    with pytest.raises(KeyboardInterrupt):
        model(mx.array([prompt(700)]), cache=prompt_cache)
    assert {each.offset for each in prompt_cache} == {256}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {"page_format": "auto"}),
        ("qwen3", {"compile": True}),
        ("mamba", {}),
        ("deepseek_v32", {}),
    ],
)
def test_what_depends_on_others_is_refused(kind: str, options: Any) -> None:
    with pytest.raises(NotReproducible):
        PagedCacheFactory(small_model(kind), max_bytes=LARGE, reproducible=True, **options)


def test_a_batch_of_full_steps_gives_its_pages_back() -> None:
    model = small_model("qwen3")
    factory = PagedCacheFactory(model, max_bytes=LARGE, reproducible=True)
    with factory:
        generator = BatchGenerator(model, max_tokens=3)
        runs_of(generator, generator.insert([prompt(9, seed) for seed in range(9)]))
    del generator
    assert_written_and_free(factory)


def test_drafts_and_other_arguments_are_refused() -> None:
    model: Any = small_model("qwen3")
    with PagedCacheFactory(model, max_bytes=LARGE, reproducible=True) as factory:
        with pytest.raises(NotReproducible):
            SpeculativeBatchGenerator(model, NGramDraft()).insert([prompt(9)])
        with pytest.raises(NotReproducible):
            model(mx.array([prompt(9)]), factory.make_cache(), mx.zeros((1, 9, 64)))


def test_where_the_longest_row_cuts_attention_a_step_has_one_row() -> None:
    model = small_model("qwen3")
    found = []
    kinds: list[Any] = [{"backend": Backend()}, {"always_gather": True}]
    for options in kinds:
        factory = PagedCacheFactory(model, max_bytes=LARGE, reproducible=True, **options)
        factory.make_cache()
        found.append(fixed_steps.rows_of_step(factory.pool))
    assert found == [1, 1]


@pytest.mark.slow
def test_a_device_is_tried_once_and_refused_if_rows_change_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = small_model("qwen3", hidden_size=576, intermediate_size=1536)
    with monkeypatch.context() as patch:
        # As on a device whose products depend on the number of rows, even of full steps.
        patch.setattr(fixed_steps, "_cut", _unfilled)
        with pytest.raises(NotReproducible):
            PagedCacheFactory(model, max_bytes=LARGE, reproducible=True)
    PagedCacheFactory(model, max_bytes=LARGE, reproducible=True)
    monkeypatch.delattr(trials, "_different")
    PagedCacheFactory(model, max_bytes=LARGE, reproducible=True)


def _unfilled(batch: Any, rows: int) -> Any:
    numbers = [*range(len(batch.sequences))]
    yield fixed_steps._Rows(batch.sequences, numbers, len(numbers))
