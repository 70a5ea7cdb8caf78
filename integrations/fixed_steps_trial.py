"""Says for which models, options and devices steps of fixed shapes give the same bits.

What must hold of the device is tried with the model itself, when the first reproducible factory of
its shapes is made: sequences decode alone, beside others, and in every place of a step. A file in
the cache folder remembers what passed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.generate import PromptProcessingBatch

from paged_kv.allocator.errors import NotReproducible
from paged_kv.integrations.batching.prompt_caches import unpaged_caches
from paged_kv.integrations.cache_options import CacheOptions
from paged_kv.integrations.fixed_steps import ROWS, described_device
from paged_kv.integrations.heads.model_head import heads
from paged_kv.integrations.paged_model import PagedModel
from paged_kv.integrations.passed_trials import PassedTrials
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.page_pool import PagePool

# Sequences that share so many pages are read together on GPUs: see `kernels.gpu.tuning`.
_LONG, _SHORT, _LEAST = 3 * PAGE_SIZE + 32, PAGE_SIZE + 44, 5
_STEPS = 2
_STATES = {"ArraysCache", "CountedArraysCache"}
_passed = PassedTrials("fixed-steps.json")

Bits = tuple[bytes, ...]


def require_possible(
    options: CacheOptions, pool: PagePool, prompt_cache: list[Any], ranks: int
) -> None:
    """Check what a reproducible factory is asked for beside that.

    Args:
        options: of the factory.
        pool: its pool.
        prompt_cache: one of its prompt caches.
        ranks: how many processes share the model.

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
    """Try steps of fixed shapes on this device, unless a model of these shapes has passed.

    Args:
        model: of mlx-lm or mlx-vlm.
        options: of the factory that is to be reproducible.

    Raises:
        NotReproducible: a sequence got other bits beside others than alone.
    """
    # Pages of its own: the factory's budget may hold less.
    paged = PagedModel(model, replace(options, max_bytes=None, store=None))
    pool = paged.new_pool(None)
    tried = _described(paged.module, pool)
    if tried in _passed:
        return
    paged.replace_calls()
    try:
        paged.open_layers(pool)
        found = _different(paged.module, partial(paged.new_cache, pool))
    finally:
        paged.close()
    if found is not None:
        raise NotReproducible(
            f"reproducible is not possible for {pool.name} on this device: {found}, so its "
            f"products or its attention depend on other rows ({described_device(pool)}). Leave "
            "reproducible out"
        )
    _passed.add(tried)


def _different(model: Any, make_cache: Callable[[], list[Any]]) -> str | None:
    """Which sequence gets other bits than alone, in words; None if none does."""
    caches = {length: _read(model, make_cache(), length) for length in (_LONG, _SHORT, _LEAST)}
    alone = {length: _bits(model, [cache], 0) for length, cache in caches.items()}
    long, short, least = caches.values()
    companies = {
        "sequences that begin alike": [long] * ROWS,
        "longer and shorter ones": [short, long, least],
        "as many as take two steps": [least] * (ROWS - 1) + [short, long],
    }
    for name, company in companies.items():
        for row in {0, 1, len(company) - 2, len(company) - 1}:
            length = next(each for each, cache in caches.items() if cache is company[row])
            if _bits(model, company, row) != alone[length]:
                return f"in row {row} beside {name}, {length} tokens went on with other bits"
    again = _bits(model, [_read(model, make_cache(), _SHORT)], 0)
    return None if again == alone[_SHORT] else "the same prompt gave other bits a second time"


def _read(model: Any, prompt_cache: list[Any], length: int) -> list[Any]:
    """A prompt cache that holds so many tokens."""
    for begin in range(0, length, PAGE_SIZE):
        tokens = [_token(at) for at in range(begin, min(begin + PAGE_SIZE, length))]
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
        tokens = [[_token(step if at == row else step + 7 * at)] for at in range(len(company))]
        logits = model(mx.array(tokens), cache=caches)[row]
        found.append(bytes(memoryview(logits.astype(mx.float32))))
    return tuple(found)


def _token(at: int) -> int:
    return (7 * at * at + 3 * at + 1) % 61


def _described(model: Any, pool: PagePool) -> str:
    parameters: Any = tree_flatten(model.parameters())
    shapes = [(name, each.shape, str(each.dtype)) for name, each in parameters]
    digest = hashlib.sha256(repr((shapes, pool.windows, pool.read_tokens)).encode()).hexdigest()
    return f"{pool.name} {digest} {pool.page_format.name} {described_device(pool)}"
