"""An installed factory reaches every function of mlx-lm that makes its own caches."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import batch_generate, cache_prompt, chat, generate, stream_generate
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import load_prompt_cache

from paged_kv import PagedCacheFactory, PagedKVCache
from tests.support.generation import assert_written_and_free

# Several sequences at once, or masks in another form: float32 sums in another order.
FLOAT32_TOLERANCE = 1e-3
NEW_TOKENS = 14


def streamed(model: Any, tokenizer: Any, prompts: list[list[int]]) -> Any:
    return [r.token for r in stream_generate(model, tokenizer, prompts[0], max_tokens=NEW_TOKENS)]


def generated(model: Any, tokenizer: Any, prompts: list[list[int]]) -> Any:
    return generate(model, tokenizer, prompts[0], max_tokens=NEW_TOKENS)


def batched(model: Any, tokenizer: Any, prompts: list[list[int]]) -> Any:
    return batch_generate(model, tokenizer, prompts, max_tokens=NEW_TOKENS).texts


def speculated(model: Any, tokenizer: Any, prompts: list[list[int]]) -> Any:
    return [
        token
        for token, _, _ in speculative_generate_step(
            mx.array(prompts[0]), model, model, max_tokens=NEW_TOKENS, num_draft_tokens=3
        )
    ]


@pytest.mark.parametrize("run", [generated, streamed, batched, speculated])
@pytest.mark.slow
def test_the_same_output_from_installed_caches(
    run: Callable[..., Any],
    model_and_tokenizer: Any,
    prompts: list[list[int]],
    factory: PagedCacheFactory,
) -> None:
    stock = run(*model_and_tokenizer, prompts)
    assert factory.stats().slabs == 0
    with factory:
        assert run(*model_and_tokenizer, prompts) == stock
    assert_written_and_free(factory)


def test_a_batch_has_the_same_log_probabilities_and_gives_paged_caches(
    model_and_tokenizer: Any, prompts: list[list[int]], factory: PagedCacheFactory
) -> None:
    model, tokenizer = model_and_tokenizer
    options: dict[str, Any] = {
        "max_tokens": 8,
        "return_logprobs": True,
        "return_prompt_caches": True,
    }
    stock: Any = batch_generate(model, tokenizer, prompts, **options)
    with factory:
        ours: Any = batch_generate(model, tokenizer, prompts, **options)
    assert ours.texts == stock.texts
    for row, expected in zip(ours.logprobs, stock.logprobs, strict=True):
        assert row == pytest.approx(expected, abs=FLOAT32_TOLERANCE)
    assert {type(layer) for cache in ours.caches for layer in cache} == {PagedKVCache}
    assert [cache[0].size() for cache in ours.caches] == [cache[0].size() for cache in stock.caches]
    del ours
    assert_written_and_free(factory)


def run_main(module: Any, monkeypatch: pytest.MonkeyPatch, loaded: Any, *arguments: str) -> None:
    """A command of mlx-lm that gets the given model instead of loading one."""

    def load(*args: Any, return_config: bool = False, **options: Any) -> Any:
        return (*loaded, {}) if return_config else loaded

    monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(sys, "argv", [module.__name__, "--model", "any", *arguments])
    module.main()


def test_chat_says_the_same(
    model_and_tokenizer: Any,
    factory: PagedCacheFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def conversation() -> list[str]:
        """Two turns in one cache, and after a reset a third one."""
        lines = iter(["def read_file(path):\n", "class Reader:\n", "r", "import os\n", "q"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
        # mlx-lm ignores the bound for this model.
        options = ("--max-tokens", "16", "--max-kv-size", "8")
        run_main(chat, monkeypatch, model_and_tokenizer, *options)
        said = capsys.readouterr().out.splitlines()
        return [line for line in said if "tok/s" not in line]

    stock = conversation()
    assert len(stock) > 4
    with factory:
        assert conversation() == stock
    assert_written_and_free(factory)


def test_a_prompt_cached_in_a_file_is_continued_alike(
    model_and_tokenizer: Any,
    source_text: str,
    factory: PagedCacheFactory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def saved_and_continued(name: str) -> str:
        file = str(tmp_path / f"{name}.safetensors")
        saved = ["--prompt-cache-file", file, "--prompt"]
        run_main(cache_prompt, monkeypatch, model_and_tokenizer, *saved, source_text[20000:20900])
        capsys.readouterr()
        continued = ["--verbose", "False", "--max-tokens", "16", *saved, "def "]
        # `mlx_lm.generate` is a function if somebody imported the package.
        generate_module = importlib.import_module("mlx_lm.generate")
        run_main(generate_module, monkeypatch, model_and_tokenizer, *continued)
        return capsys.readouterr().out

    stock = saved_and_continued("stock")
    assert stock.strip()
    with factory:
        assert saved_and_continued("ours") == stock
    assert_written_and_free(factory)
    loaded, metadata = load_prompt_cache(str(tmp_path / "ours.safetensors"), return_metadata=True)
    assert {type(layer) for layer in loaded} == {PagedKVCache}
    assert loaded[0].pool is factory.pool
    assert json.loads(metadata["tokenizer_config"]) == {"trust_remote_code": False}
    assert factory.stats().blocks_used > 0
    del loaded
    assert_written_and_free(factory)
