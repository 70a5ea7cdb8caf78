"""What decides the tokens of choices: samplers, made from mlx-lm's filters and logits processors;
the grammars that are compiled for a model; and the tokens that end a choice.

Samplers are tried before they join a batch, as an exception in a batch would fail all its jobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, greedy_sampler
from mlx_lm.server import GenerationArguments, SamplingArguments

from paged_kv.integrations.grammar.constraints import CallConstraint, Constraint
from paged_kv.integrations.grammar.grammars import Grammar
from paged_kv.integrations.grammar.vocabulary import CompiledGrammar, Vocabulary
from paged_kv.integrations.mlx_lm_internals import logits_processors
from paged_kv.lru import LRU
from paged_kv.server.http.api_errors import APIError, wrong_value

Sampler = Callable[[mx.array], mx.array]

_MOST_KNOWN = 256

# A character of a schema becomes some hundred bytes. At most 64 grammars are kept.
_MOST_CHARACTERS, _LEAST_COUNTED = 1 << 20, 1 << 14


@dataclass(frozen=True)
class Sampling:
    """The sampler and logits processors of one choice."""

    sampler: Sampler
    processors: list[Any]


class RandomSampler:
    """Samples tokens as mlx-lm's `make_sampler` does for a temperature that is not 0.

    Args:
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
    """Makes the samplings of jobs for one model. mlx-lm samples all sequences of a batch with the
    same sampler in one call, so jobs with equal options share a sampler.

    Args:
        default_seed: of requests that give none; None for MLX's global random numbers.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, default_seed: int | None = None) -> None:
        self._default_seed = default_seed
        self._vocab_size = vocab_size
        self._special_tokens = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        self._known: dict[Any, Sampler] = {}

    def of(self, arguments: GenerationArguments, choices: int) -> list[Sampling]:
        """One sampling for each choice; raises APIError 400 if the options do not work."""
        try:
            processors = logits_processors(arguments)
            samplers = [self._sampler(arguments, number) for number in range(choices)]
            if arguments.sampling.temperature:
                self._try(RandomSampler(arguments.sampling, self._special_tokens), processors)
            elif processors:
                self._try(greedy_sampler, processors)
        except Exception as error:
            raise wrong_value(f"tokens cannot be chosen with these options: {error}") from error
        return [Sampling(sampler, [*processors]) for sampler in samplers]

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


def model_constraint(
    requested: Constraint | CallConstraint | None, tokenizer: Any
) -> Constraint | None:
    """What a request's constraint means for a model's tokenizer, or APIError 400 if the model does
    not call tools as is asked. What depends on the tokenizer is None without it."""
    if requested is None or isinstance(requested, Constraint):
        return requested
    try:
        return None if tokenizer is None else requested.for_model(tokenizer)
    except ValueError as error:
        raise wrong_value(f"{requested.field}: {error}", requested.field) from None


class ModelGrammars:
    """Compiles grammars for one tokenizer, and keeps the latest. Any thread may use it."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._lock = Lock()
        self._known: LRU[Grammar, Future[CompiledGrammar]] = LRU(
            _MOST_CHARACTERS, lambda grammar, _: max(len(grammar.text), _LEAST_COUNTED)
        )

    def compiled(self, constraint: Constraint) -> CompiledGrammar:
        """The compiled grammar of a constraint. A new one takes milliseconds to a second, for which
        only those wait that ask for it. Raises APIError 400 if it does not compile, or the extra
        `structured` is not installed."""
        grammar = constraint.grammar
        try:
            with self._lock:
                if self._vocabulary is None:
                    self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
                future, is_new = self._known.use(grammar), grammar not in self._known
                if future is None:
                    future = self._known[grammar] = Future()
            if is_new:
                self._compile(grammar, self._vocabulary, future)
            return future.result()
        except ValueError as error:
            raise wrong_value(f"{constraint.field}: {error}", constraint.field) from error

    def begin_compiling(self, constraint: Constraint) -> None:
        """Compile a grammar on a thread, so that it is there when a request begins."""

        def compile_it() -> None:
            with suppress(APIError):  # which the request gets when it begins
                self.compiled(constraint)

        Thread(target=compile_it, name="paged-kv-grammar", daemon=True).start()

    def made(self, compiled: CompiledGrammar) -> bool:
        """Whether a grammar was compiled for this tokenizer."""
        return self._vocabulary is not None and compiled.tokens is self._vocabulary.tokens

    def _compile(
        self, grammar: Grammar, vocabulary: Vocabulary, future: Future[CompiledGrammar]
    ) -> None:
        try:
            future.set_result(vocabulary.compiled(grammar))
        except BaseException as error:
            with self._lock:
                self._known.pop(grammar, None)
            future.set_exception(error)


@dataclass(frozen=True)
class Ending:
    """The tokens that end the choices of a job."""

    stop_token_ids: tuple[int, ...] = ()  # tokens that end a choice beside the model's end tokens
    ignores_end: bool = False  # whether the model's end tokens end nothing
    min_tokens: int = 0  # no choice ends by a token or a stop text among so many first ones

    def tokens(self, tokenizer: Any) -> list[int]:
        own = () if self.ignores_end else tokenizer.eos_token_ids
        return sorted({*self.stop_token_ids, *own})

    def stop_sequences(self, tokenizer: Any) -> StopSequences:
        """The same, as mlx-lm searches for them."""
        return StopSequences([(token,) for token in self.tokens(tokenizer)] or None)

    def processors(self, tokenizer: Any, prompt_tokens: int) -> list[Any]:
        """Logits processors for a choice behind a prompt of so many tokens."""
        ids = self.tokens(tokenizer)
        if not (self.min_tokens and ids):
            return []
        ends, until = mx.array(ids), prompt_tokens + self.min_tokens

        def end_later(seen: mx.array, logits: mx.array) -> mx.array:
            if len(seen) < until:
                logits[..., ends] = -mx.inf
            return logits

        return [end_later]
