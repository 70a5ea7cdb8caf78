"""Tries on this machine what pages are trusted with only then. A file in the cache folder remembers
what passed.

`require_trusted` tries a version of mlx-lm that was released after this package: a small random
model generates with mlx-lm's caches and with pages, in the ways that paged_kv builds on, and must
give equal tokens.

`require_fixed_steps` tries whether steps of fixed shapes give the same bits on this device, when
the first reproducible factory of a model's shapes is made: with the model itself, sequences decode
alone, beside others, and in every place of a step.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch, generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import llama

from paged_kv.allocator.errors import NotReproducible
from paged_kv.extras import TESTED_MLX_LM, MLXLMChanged
from paged_kv.integrations.batching.prompt_caches import unpaged_caches
from paged_kv.integrations.cache_options import CacheOptions
from paged_kv.integrations.fixed_steps import ROWS, described_device
from paged_kv.integrations.heads.model_head import heads
from paged_kv.integrations.paged_model import PagedModel
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.kernels.pages.verdicts import RIGHT, read_found, verdict_file, write_found
from paged_kv.pool.page_pool import PagePool

Tokens = list[int]
Bits = tuple[bytes, ...]

# Of what the file says.
_MLX_LM, _FIXED_STEPS = "mlx-lm", "steps of fixed shapes"


def _tokens(begin: int, end: int) -> Tokens:
    return [(7 * at * at + 3 * at + 1) % 61 for at in range(begin, end)]


# Longer than a page; and of unequal lengths, so that batches have padding.
_PROMPT = _tokens(0, 270)
_PROMPTS = [_PROMPT, _PROMPT[:5], _PROMPT[3:40]]
_NEW_TOKENS = 6
_trusted = set(TESTED_MLX_LM)

# Sequences that share so many pages are read together on GPUs: see `kernels.gpu.tuning`.
_LONG, _SHORT, _LEAST = 3 * PAGE_SIZE + 32, PAGE_SIZE + 44, 5
_STEPS = 2
_STATES = {"ArraysCache", "CountedArraysCache"}


def require_trusted(make_factory: Callable[[Any], Any]) -> None:
    """Try the version of mlx-lm that is installed with a factory that `make_factory(model)` makes,
    unless it has been tested or tried.

    Raises:
        MLXLMChanged: something went another way with pages than with mlx-lm's caches.
    """
    found = version("mlx-lm")
    versions = f"mlx-lm {found}, mlx {version('mlx')}, paged_kv {version('paged-kv')}"
    if found in _trusted or _has_passed(_MLX_LM, versions):
        return
    _trusted.add(found)  # The factory of the trial asks too.
    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        _try_mlx_lm(make_factory)
    except BaseException:
        _trusted.remove(found)
        raise
    finally:
        mx.random.seed(high << 32 | low)  # A program's random numbers do not depend on a trial.
    _remember(_MLX_LM, versions)


def _try_mlx_lm(make_factory: Callable[[Any], Any]) -> None:
    model = _small_model()
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


def _batched(model: Any) -> list[Tokens]:
    generator = BatchGenerator(model, max_tokens=_NEW_TOKENS)
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
    "generate": lambda model: _continued(model, mlx_lm_cache.make_prompt_cache(model), _PROMPT),
    "batches with rows of unequal length": _batched,
    "trim": _trimmed,
    "save and load": _loaded,
}


def _continued(model: Any, prompt_cache: list[Any], prompt: Tokens) -> Tokens:
    steps = generate_step(
        mx.array(prompt), model, prompt_cache=prompt_cache, max_tokens=_NEW_TOKENS
    )
    return [int(token) for token, _ in steps]


def _small_model() -> Any:
    """A model of two layers, in float32. Its weights are always the same."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}
    model = llama.Model(llama.ModelArgs.from_dict({"model_type": "llama", **sizes, **heads}))
    keys = map(mx.random.key, range(1000))
    model.update(
        tree_map(lambda each: mx.random.normal(each.shape, key=next(keys)), model.parameters())
    )
    return model


def require_possible(
    options: CacheOptions, pool: PagePool, prompt_cache: list[Any], ranks: int
) -> None:
    """Check what a reproducible factory is asked for beside that, by its options, its pool and one
    of its prompt caches; `ranks` processes share the model.

    Raises:
        NotReproducible: results would depend on other requests; the message says why.
    """
    padded = {type(each).__name__ for each in unpaged_caches(prompt_cache)} - _STATES
    reasons = {
        "page_format auto requantises pages when other sequences need memory: name one format": (
            pool.requantisation_policy is not None
        ),
        "decode leaves out offloaded pages that are late: leave offload out": (
            pool.offloading is not None
        ),
        "recorded steps may round in other ways: leave compile=True out": bool(options.compile),
        "a prediction head drafts, and steps that verify drafts have another number of tokens: "
        "leave the head out": heads.get(pool) is not None,
        f"{ranks} processes share the model, and how they add up was not tried: use one": ranks > 1,
        f"layers of {pool.name} append rows beside keys and values, which are computed in groups "
        "of their own: leave reproducible out": bool(pool.rows),
        f"layers of {pool.name} keep caches that batches pad ({', '.join(sorted(padded))}): leave "
        "reproducible out": bool(padded),
        f"no layer of {pool.name} keeps keys and values, and states alone are not cut at pages: "
        "leave reproducible out": not pool.num_layers,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise NotReproducible(f"reproducible is not possible: {reason}")


def require_fixed_steps(model: Module, options: CacheOptions) -> None:
    """Try steps of fixed shapes on this device, with the options of the factory that is to be
    reproducible, unless a model of these shapes has passed.

    Raises:
        NotReproducible: a sequence got other bits beside others than alone.
    """
    # Pages of its own: the factory's budget may hold less.
    paged = PagedModel(model, replace(options, max_bytes=None, store=None))
    pool = paged.pool
    module: Any = paged.module  # its methods have no types
    parameters: Any = tree_flatten(module.parameters())
    shapes = [(name, each.shape, str(each.dtype)) for name, each in parameters]
    digest = hashlib.sha256(repr((shapes, pool.windows, pool.read_tokens)).encode()).hexdigest()
    tried = f"{pool.name} {digest} {pool.page_format.name} {described_device(pool)}"
    if _has_passed(_FIXED_STEPS, tried):
        return
    paged.replace_calls()
    try:
        paged.open_layers(pool)
        found = _different(module, partial(paged.new_cache, pool))
    finally:
        paged.close()
    if found is not None:
        raise NotReproducible(
            f"reproducible is not possible for {pool.name} on this device: {found}, so its "
            f"products or its attention depend on other rows ({described_device(pool)}). Leave "
            "reproducible out"
        )
    _remember(_FIXED_STEPS, tried)


def _different(model: Any, make_cache: Callable[[], list[Any]]) -> str | None:
    """Which sequence gets other bits than alone, in words; None if none does."""
    caches = {length: _read(model, make_cache(), length) for length in (_LONG, _SHORT, _LEAST)}
    alone = {length: _bits(model, [cache], 0) for length, cache in caches.items()}
    companies = {
        "sequences that begin alike": [_LONG] * ROWS,
        "longer and shorter ones": [_SHORT, _LONG, _LEAST],
        "as many as take two steps": [_LEAST] * (ROWS - 1) + [_SHORT, _LONG],
    }
    for name, lengths in companies.items():
        for row in {0, 1, len(lengths) - 2, len(lengths) - 1}:
            if _bits(model, [caches[each] for each in lengths], row) != alone[lengths[row]]:
                return f"in row {row} beside {name}, {lengths[row]} tokens went on with other bits"
    again = _bits(model, [_read(model, make_cache(), _SHORT)], 0)
    return None if again == alone[_SHORT] else "the same prompt gave other bits a second time"


def _read(model: Any, prompt_cache: list[Any], length: int) -> list[Any]:
    """A prompt cache that holds so many tokens."""
    for begin in range(0, length, PAGE_SIZE):
        tokens = _tokens(begin, min(begin + PAGE_SIZE, length))
        model(mx.array([tokens]), cache=prompt_cache)
        mx.eval([each.state for each in prompt_cache])
    return prompt_cache


def _bits(model: Any, company: list[list[Any]], row: int) -> Bits:
    """The logits of a row in the next steps of forks of these caches."""
    forks = [deepcopy(each) for each in company]
    caches = PromptProcessingBatch(model, [*range(len(forks))], forks).prompt_cache
    found = []
    for step in range(_STEPS):
        # Others get other tokens.
        places = [step if at == row else step + 7 * at for at in range(len(company))]
        tokens = mx.array([_tokens(place, place + 1) for place in places])
        logits = model(tokens, cache=caches)[row]
        found.append(bytes(memoryview(logits.astype(mx.float32))))
    return tuple(found)


def _has_passed(of: str, tried: str) -> bool:
    return tried in read_found(_file(), of)


def _remember(of: str, tried: str) -> None:
    """Remember that something passed. Without the file, the next process tries it again."""
    with suppress(OSError):
        write_found(_file(), of, {**read_found(_file(), of), tried: RIGHT})


def _file() -> Path:
    return verdict_file().with_name("trials.json")
