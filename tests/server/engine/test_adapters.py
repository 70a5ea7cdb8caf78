"""A server with adapters: what one has computed is never found by another."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests.support.running_server import assert_idle_pools_hold_nothing, paged_server
from tests.support.tiny_model import completion, tokens_of

LORA = {"rank": 2, "scale": 20.0, "dropout": 0.0}
PROMPT = tokens_of(0, 400)


@pytest.fixture(scope="module")
def adapters(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two folders with random adapters that change what the model says."""
    return [write_adapter(tiny, tmp_path_factory.mktemp("adapter"), seed) for seed in (1, 2)]


def write_adapter(tiny: str, folder: Path, seed: int) -> str:
    model, *_ = mlx_lm.load(tiny)
    model.freeze()
    linear_to_lora_layers(model, 1, LORA)
    mx.random.seed(seed)
    added: Any = tree_flatten(model.trainable_parameters())
    weights = {name: mx.random.normal(weight.shape) * 0.1 for name, weight in added}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def said(tiny: str, adapter: str | None) -> str:
    """What mlx-lm's own caches say."""
    model, tokenizer, *_ = mlx_lm.load(tiny, adapter_path=adapter)
    tokenizer.eos_token_ids = set()
    return mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=12)


@pytest.mark.slow
def test_no_adapter_finds_the_prompts_of_another(
    adapters: list[str], tiny: str, tmp_path: Path
) -> None:
    """Neither in memory nor in the store, in which they are all together."""
    each = [None, *adapters]
    expected = [said(tiny, adapter) for adapter in each]
    assert len(set(expected)) == 3
    options = ["--model", tiny, "--allow-model-switch", "--max-kv-bytes", "64MB"]
    options += ["--store-after", "1"]
    with paged_server(*options, "--store", str(tmp_path)) as running:
        bodies = [{"extra_body": {"adapters": adapter}} if adapter else {} for adapter in each]
        for cached in (0, 256):
            for body, answer in zip(bodies, expected, strict=True):
                assert completion(running, PROMPT, max_tokens=12, **body) == (answer, cached)
                running.wait_until_idle()
        assert_idle_pools_hold_nothing(running)
