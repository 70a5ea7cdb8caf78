"""Tries a version of mlx-lm that was released after this package, before pages are trusted with it.

A small random model generates with mlx-lm's caches and with pages, in the ways that paged_kv builds
on. Equal tokens let that version pass; a file in the cache folder remembers it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import llama

from paged_kv.extras import TESTED_MLX_LM, MLXLMChanged
from paged_kv.integrations.passed_trials import PassedTrials

Tokens = list[int]

# Longer than a page; and of unequal lengths, so that batches have padding.
_PROMPT = [(7 * at * at + 3 * at + 1) % 61 for at in range(270)]
_PROMPTS = [_PROMPT, _PROMPT[:5], _PROMPT[3:40]]
_STEPS = 6
_trusted = set(TESTED_MLX_LM)
_passed = PassedTrials("tried-mlx-lm.json")


def require_trusted(make_factory: Callable[[Any], Any]) -> None:
    """Try the version of mlx-lm that is installed, unless it has been tested or tried.

    Args:
        make_factory: makes a factory of a model.

    Raises:
        MLXLMChanged: something went another way with pages than with mlx-lm's caches.
    """
    found = version("mlx-lm")
    versions = f"mlx-lm {found}, mlx {version('mlx')}, paged_kv {version('paged-kv')}"
    if found in _trusted or versions in _passed:
        return
    _trusted.add(found)  # The factory of the trial asks too.
    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        _try_out(make_factory)
    except BaseException:
        _trusted.remove(found)
        raise
    finally:
        mx.random.seed(high << 32 | low)  # A program's random numbers do not depend on a trial.
    _passed.add(versions)


def _try_out(make_factory: Callable[[Any], Any]) -> None:
    model = _model()
    with closing(make_factory(model)) as factory:
        for part, generated in _PARTS.items():
            try:
                expected = generated(model)
                with factory:  # then `make_prompt_cache` makes pages
                    found = generated(model)
            except Exception as error:  # whatever a changed function raises
                raise MLXLMChanged(f"cannot be used for {part} ({error!r})") from error
            if found != expected:
                raise MLXLMChanged(f"gives other tokens with pages than without in {part}")


def _generated(model: Any) -> Tokens:
    return _continued(model, mlx_lm_cache.make_prompt_cache(model), _PROMPT)


def _batched(model: Any) -> list[Tokens]:
    generator = BatchGenerator(model, max_tokens=_STEPS)
    tokens: dict[int, Tokens] = {uid: [] for uid in generator.insert(_PROMPTS)}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    return list(tokens.values())


def _trimmed(model: Any) -> Tokens:
    prompt_cache = mlx_lm_cache.make_prompt_cache(model)
    _continued(model, prompt_cache, _PROMPT)
    mlx_lm_cache.trim_prompt_cache(prompt_cache, 20)
    return _continued(model, prompt_cache, _PROMPTS[1])


def _loaded(model: Any) -> Tokens:
    prompt_cache = mlx_lm_cache.make_prompt_cache(model)
    _continued(model, prompt_cache, _PROMPT)
    with TemporaryDirectory() as folder:
        file = os.path.join(folder, "prompt.safetensors")
        mlx_lm_cache.save_prompt_cache(file, prompt_cache)
        return _continued(model, mlx_lm_cache.load_prompt_cache(file), _PROMPTS[1])


_PARTS: dict[str, Callable[[Any], Any]] = {
    "generate": _generated,
    "batches with rows of unequal length": _batched,
    "trim": _trimmed,
    "save and load": _loaded,
}


def _continued(model: Any, prompt_cache: list[Any], prompt: Tokens) -> Tokens:
    steps = generate_step(mx.array(prompt), model, prompt_cache=prompt_cache, max_tokens=_STEPS)
    return [int(token) for token, _ in steps]


def _model() -> Any:
    """A model of two layers, in float32. Its weights are always the same."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}
    arguments = llama.ModelArgs.from_dict({"model_type": "llama", **sizes, **heads})
    model = llama.Model(arguments)
    keys = map(mx.random.key, range(1000))
    model.update(
        tree_map(lambda each: mx.random.normal(each.shape, key=next(keys)), model.parameters())
    )
    return model
