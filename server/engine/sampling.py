"""Makes the samplers of jobs from mlx-lm's filters and logits processors. Each is tried before it
joins a batch, as an exception in a batch would fail all its jobs. Says which tokens end a choice,
and when they may: vLLM's `stop_token_ids`, `ignore_eos` and `min_tokens`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, greedy_sampler
from mlx_lm.server import GenerationArguments, SamplingArguments

from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar
from paged_kv.integrations.grammar.processor import GrammarProcessor
from paged_kv.integrations.mlx_lm_internals import logits_processors
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.http.api_errors import wrong_value

Sampler = Callable[[mx.array], mx.array]

_MOST_KNOWN = 256


@dataclass(frozen=True)
class Sampling:
    """The sampler and logits processors of one choice."""

    sampler: Sampler
    processors: list[Any]

    def within(self, grammar: FollowedGrammar) -> Sampling:
        """This sampling of the tokens that a grammar allows."""
        return Sampling(self.sampler, [*self.processors, GrammarProcessor(grammar)])


class RandomSampler:
    """Samples tokens as mlx-lm's `make_sampler` does; with a seed, reproducibly.

    Args:
        options: mlx-lm's; the temperature is not 0.
        special_tokens: tokens that XTC never filters.
        seed: of its own random numbers, so that other sequences of a batch have no influence. None
            means MLX's global ones.
    """

    def __init__(
        self, options: SamplingArguments, special_tokens: list[int], seed: int | None = None
    ) -> None:
        self._options = options
        self._special_tokens = special_tokens
        self._key = None if seed is None else mx.random.key(seed)

    def __call__(self, logprobs: mx.array) -> mx.array:
        with _uncompiled():
            filtered = self._filtered(logprobs)
        return mx.random.categorical(filtered * (1 / self._options.temperature), key=self._next())

    def _filtered(self, logprobs: mx.array) -> mx.array:
        options = self._options
        if 0 < options.top_p < 1:
            logprobs = apply_top_p(logprobs, options.top_p)
        if options.min_p:
            logprobs = apply_min_p(logprobs, options.min_p)
        if options.xtc_probability:
            threshold, special = options.xtc_threshold, self._special_tokens
            is_left = mx.random.uniform(0, 1, key=self._next()) > options.xtc_probability
            logprobs = mx.where(is_left, logprobs, apply_xtc(logprobs, 1.0, threshold, special))
        if options.top_k:
            logprobs = apply_top_k(logprobs, options.top_k)
        return logprobs

    def _next(self) -> mx.array | None:
        """The next random key, split off as MLX splits its global state; None without a seed."""
        if self._key is None:
            return None
        self._key, key = mx.random.split(self._key)
        return key


class Samplers:
    """Makes the samplings of jobs for one model.

    Args:
        loaded: the model.
        default_seed: of requests that give none; None for MLX's global random numbers.

    mlx-lm samples all sequences of a batch with the same sampler in one call, so jobs with equal
    options share a sampler.
    """

    def __init__(self, loaded: LoadedModel, default_seed: int | None = None) -> None:
        self._default_seed = default_seed
        tokenizer = loaded.tokenizer
        self._vocab_size = loaded.vocab_size
        self._special_tokens = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        self._known: dict[Any, Sampler] = {}

    def of(self, arguments: GenerationArguments, choices: int) -> list[Sampling]:
        """One sampling for each choice.

        Raises:
            APIError: 400, the options do not work.
        """
        try:
            processors = logits_processors(arguments)
            samplers = [self._sampler(arguments, number) for number in range(choices)]
            if arguments.sampling.temperature:
                self._try(RandomSampler(arguments.sampling, self._special_tokens), processors)
            elif processors:
                self._try(greedy_sampler, processors)
        except Exception as error:
            raise wrong_value(f"tokens cannot be chosen with these options: {error}") from error
        return [Sampling(sampler, processors) for sampler in samplers]

    def _sampler(self, arguments: GenerationArguments, number: int) -> Sampler:
        options = arguments.sampling
        seed = self._default_seed if arguments.seed is None else arguments.seed
        if not options.temperature:
            return greedy_sampler
        if seed is not None:
            return RandomSampler(options, self._special_tokens, (seed + number) % 2**64)
        if options.xtc_probability:
            # XTC draws one random number per call, so each choice needs a sampler of its own.
            return RandomSampler(options, self._special_tokens)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        key = tuple(vars(options).values())
        return self._known.setdefault(key, RandomSampler(options, self._special_tokens))

    def _try(self, sampler: Sampler, processors: list[Any]) -> None:
        logits = mx.zeros((1, self._vocab_size))
        for processor in processors:
            logits = processor(mx.array([0, 0]), logits)
        mx.eval(sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Compute without `mx.compile`, which compiles mlx-lm's filters anew for every temperature and
    top_p that a client sends. On a CPU that runs a C++ compiler for 0.6 and 0.7 s, while all
    requests wait."""
    if "MLX_DISABLE_COMPILE" in os.environ:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


@dataclass(frozen=True)
class Ending:
    """The tokens that end the choices of a job.

    Attributes:
        stop_token_ids: tokens that end a choice beside the model's end tokens.
        ignores_end: whether the model's end tokens end nothing.
        min_tokens: no choice ends by a token or a stop text among so many first ones.
    """

    stop_token_ids: tuple[int, ...] = ()
    ignores_end: bool = False
    min_tokens: int = 0

    def tokens(self, tokenizer: Any) -> list[int]:
        """The ids of the tokens that end a choice."""
        own = () if self.ignores_end else tokenizer.eos_token_ids
        return sorted({*self.stop_token_ids, *own})

    def stop_sequences(self, tokenizer: Any) -> StopSequences:
        """The same, as mlx-lm searches for them."""
        return StopSequences([(token,) for token in self.tokens(tokenizer)] or None)

    def processors(self, tokenizer: Any, prompt_tokens: int) -> list[Any]:
        """Logits processors for a choice behind a prompt of so many tokens."""
        tokens = self.tokens(tokenizer)
        until = prompt_tokens + self.min_tokens
        return [EndsLater(tokens, until)] if self.min_tokens and tokens else []


class EndsLater:
    """One of mlx-lm's logits processors: a sequence of fewer than `until` tokens does not continue
    with one of some tokens.

    Args:
        tokens: ids; not empty.
        until: counts the prompt's tokens too.
    """

    def __init__(self, tokens: Sequence[int], until: int) -> None:
        self._tokens = mx.array(list(tokens))
        self._until = until

    def __call__(self, seen: mx.array, logits: mx.array) -> mx.array:
        if len(seen) < self._until:
            logits[..., self._tokens] = -mx.inf
        return logits
