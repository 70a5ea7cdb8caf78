"""Generates several samples for one prompt, which is computed and held once."""

from __future__ import annotations

from inspect import signature
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator, BatchResponse, batch_generate, generate_step
from mlx_lm.sample_utils import make_sampler

from paged_kv.checks import TokenIds, described, token_ids, whole_number
from paged_kv.integrations.cache_library import require_model
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.prompt_cache_hook import stock_make_prompt_cache

# Arguments of mlx-lm's functions that this module sets itself.
_OURS = frozenset(
    {"model", "tokenizer", "prompts", "prompt_caches", "prefill_step_size", "stop_tokens", "kwargs"}
)


def generate_samples(
    model: Module,
    tokenizer: Any,
    prompt: str | TokenIds,
    n: int,
    *,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    **kwargs: Any,
) -> BatchResponse:
    """`n` continuations of one prompt, as `n` of vLLM's `SamplingParams`.

    The samples share all pages of the prompt. Each copies the last, partly filled page when it
    writes its first token, and appends its own pages.

    Args:
        model: a model of mlx-lm.
        tokenizer: its tokenizer.
        prompt: text or token ids.
        n: how many samples.
        prompt_cache: a cache that the prompt continues, from
            `PagedCacheFactory(model).make_cache()`. Afterwards it holds all of the prompt but its
            last token. None means a new one.
        prefill_step_size: tokens of the prompt that one step computes.
        kwargs: for mlx-lm's `batch_generate`: max_tokens (of a sample), sampler,
            return_prompt_caches, ... The default sampler has a temperature of 1: with mlx-lm's,
            which is greedy, all samples would be equal.

    Raises:
        TypeError: an argument has the wrong type, or `batch_generate` does not know it.
        ValueError: a number is not positive, the prompt is empty or not token ids, or the cache is
            another model's.
        PoolExhausted: the budget of the cache's pool does not hold the prompt or the samples.
    """
    require_model(model)
    require_tokenizer(tokenizer)
    _require_options(kwargs)
    if kwargs.get("sampler") is None:
        kwargs["sampler"] = make_sampler(temp=1.0)
    n = whole_number("n", n, least=1)
    step = whole_number("prefill_step_size", prefill_step_size, least=1)
    tokens = token_ids(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, "prompt")
    if not tokens:
        raise ValueError("prompt is empty: give at least one token")
    if prompt_cache is None:
        prompt_cache = PagedCacheFactory(model).make_cache()
    elif not isinstance(prompt_cache, list):
        raise TypeError(f"prompt_cache must be a list of caches, got {described(prompt_cache)}")
    elif len(prompt_cache) != (expected := len(stock_make_prompt_cache(model))):
        raise ValueError(
            f"prompt_cache must be {expected} caches, as make_cache() makes them for this model, "
            f"got {len(prompt_cache)}"
        )
    read_shared(model, tokens, prompt_cache, step)
    return batch_generate(
        model,
        tokenizer,
        [tokens[-1:]] * n,
        # A batch forks its caches, so all samples can be given the same one.
        prompt_caches=[prompt_cache] * n,
        prefill_step_size=step,
        **kwargs,
    )


def require_tokenizer(tokenizer: object) -> None:
    if not all(hasattr(tokenizer, name) for name in ("encode", "decode", "eos_token_ids")):
        raise TypeError(
            "tokenizer must be one of mlx-lm, such as mlx_lm.load(path_or_repo)[1], got "
            f"{described(tokenizer)}"
        )


def _require_options(options: dict[str, Any]) -> None:
    """Check options that mlx-lm would check only after computing the prompt."""
    taken = {*signature(batch_generate).parameters, *signature(BatchGenerator).parameters} - _OURS
    if unknown := sorted(options.keys() - taken):
        raise TypeError(
            f"generate_samples takes no {', '.join(unknown)}: mlx-lm's batch_generate takes "
            f"{', '.join(sorted(taken))}"
        )
    most = options.get("max_tokens", 1)
    for each in most if isinstance(most, list) else [most]:
        whole_number("max_tokens", each, least=1)


def read_shared(model: Module, tokens: list[int], cache: list[Any], step: int = 2048) -> None:
    """Write what samples of a prompt share, all tokens but the last, and generate nothing.

    Raises:
        PoolExhausted: the budget of the cache's pool does not hold it.
    """
    if len(tokens) == 1:
        return
    steps = generate_step(
        mx.array(tokens[:-1]), model, max_tokens=0, prompt_cache=cache, prefill_step_size=step
    )
    assert not list(steps)
