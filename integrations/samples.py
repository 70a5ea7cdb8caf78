"""Several answers to one prompt, which is read and kept once."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchResponse, batch_generate, generate_step

from paged_kv.integrations.paged_cache_factory import PagedCacheFactory


def generate_samples(
    model: Module,
    tokenizer: Any,
    prompt: str | list[int],
    n: int,
    *,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    **kwargs: Any,
) -> BatchResponse:
    """`n` continuations of one prompt: what `n` of vLLM's `SamplingParams` does.

    The samples share all pages of the prompt; each copies the last, partly filled one when it
    writes its first token, and adds its own behind it.

    Args:
        model: a model of mlx-lm.
        tokenizer: its tokenizer.
        prompt: text or token ids.
        n: how many samples.
        prompt_cache: what the prompt continues, from `PagedCacheFactory(model).make_cache()`. It
            holds all of the prompt but its last token afterwards. None means a new one.
        prefill_step_size: tokens of the prompt that are read at once.
        kwargs: for mlx-lm's `batch_generate`: max_tokens (of a sample), sampler,
            return_prompt_caches, ... The default sampler is greedy, and samples are alike then.

    Raises:
        ValueError: `n` is not positive, or the prompt is empty.
        PoolExhausted: the budget of the cache's pool does not hold the prompt or the samples.
    """
    if n < 1:
        raise ValueError(f"n must be a positive number of samples, got {n}")
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not tokens:
        raise ValueError("the prompt is empty: give at least one token")
    cache = prompt_cache or PagedCacheFactory(model).make_cache()
    *shared, last = tokens
    if shared:
        _read(model, shared, cache, prefill_step_size)
    return batch_generate(
        model,
        tokenizer,
        [[last]] * n,
        # Batches fork what they are given, so the samples may all be given the same.
        prompt_caches=[cache] * n,
        prefill_step_size=prefill_step_size,
        **kwargs,
    )


def _read(model: Module, tokens: list[int], cache: list[Any], step: int) -> None:
    """Write the tokens into the cache, and generate nothing."""
    steps = generate_step(
        mx.array(tokens), model, max_tokens=0, prompt_cache=cache, prefill_step_size=step
    )
    assert not list(steps)
