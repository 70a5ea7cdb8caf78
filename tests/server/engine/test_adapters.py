"""A server with adapters: what one has computed is never found by another."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from openai import NotFoundError

from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
)

MODEL = str(MODEL_FOLDERS["stdlib-llama"])
NAME = "default_model"
LORA = {"rank": 2, "scale": 20.0, "dropout": 0.0}
LAYERS = 2


@pytest.fixture(scope="module", autouse=True)
def _float32() -> Iterator[None]:
    with in_float32():
        yield


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two folders with random adapters that change what the model says."""
    return [write_adapter(tmp_path_factory.mktemp("adapter"), seed) for seed in (1, 2)]


def write_adapter(folder: Path, seed: int) -> str:
    model, *_ = mlx_lm.load(MODEL)
    model.freeze()
    linear_to_lora_layers(model, LAYERS, LORA)
    mx.random.seed(seed)
    added: Any = tree_flatten(model.trainable_parameters())
    weights = {name: mx.random.normal(weight.shape) * 0.1 for name, weight in added}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": LAYERS, "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def said(text: str, adapter: str | None) -> str:
    """What mlx-lm's own caches say."""
    model, tokenizer, *_ = mlx_lm.load(MODEL, adapter_path=adapter)
    model.set_dtype(mx.float32)
    return mlx_lm.generate(model, tokenizer, text, max_tokens=12)


def asked(running: PagedRunningServer, text: str, adapter: str | None) -> tuple[str, int]:
    """The answer, and the number of cached prompt tokens."""
    body = {} if adapter is None else {"adapters": adapter}
    answer = running.client().completions.create(
        model=NAME, prompt=text, max_tokens=12, temperature=0, extra_body=body
    )
    running.wait_until_idle()
    details: Any = answer.usage and answer.usage.prompt_tokens_details
    return answer.choices[0].text, details.cached_tokens


@pytest.mark.slow
def test_no_adapter_finds_the_prompts_of_another(
    adapters: list[str], source_text: str, tmp_path: Path
) -> None:
    """Neither in memory nor in the store, in which they are all together."""
    text, each = source_text[20000:21500], [None, *adapters]
    expected = [said(text, adapter) for adapter in each]
    assert len(set(expected)) == 3
    options = ["--model", MODEL, "--allow-model-switch", "--max-kv-bytes", "64MB"]
    options += ["--store-after", "1"]
    with paged_server(*options, "--store", str(tmp_path)) as running:
        first = [asked(running, text, adapter) for adapter in each]
        assert first == [(answer, 0) for answer in expected]
        again = [asked(running, text, adapter) for adapter in each]
        assert [answer for answer, _ in again] == expected
        assert all(cached >= 256 for _, cached in again)
        assert_idle_pools_hold_nothing(running)


@pytest.mark.slow
def test_the_adapter_of_the_server_is_the_only_one(
    adapters: list[str], source_text: str, tmp_path: Path
) -> None:
    """Unless models may be switched. Servers with other adapters share the store's folder."""
    text, (first, second) = source_text[20000:21500], adapters
    store = ["--store", str(tmp_path), "--max-kv-bytes", "64MB"]
    for adapter, cached in ((first, False), (second, False), (first, True)):
        options = ["--model", MODEL, "--adapter-path", adapter, *store]
        with paged_server(*options) as running:
            answer, tokens = asked(running, text, None)
            assert answer == said(text, adapter)
            assert (tokens >= 256) == cached
            assert asked(running, text, adapter)[0] == answer
            other = second if adapter == first else first
            with pytest.raises(NotFoundError, match="is not served here"):
                asked(running, text, other)
