"""Runs one job alone: with images, mlx-lm's quantised keys and values, or a model whose caches
cannot be batched. Nothing is drafted for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import make_stop_sequences, maybe_quantize_kv_cache, stream_generate
from mlx_lm.models.cache import make_prompt_cache

from paged_kv.integrations.server.generation.batched_rows import Happened, as_token
from paged_kv.integrations.server.generation.jobs import Job, Progress, Prompt
from paged_kv.integrations.server.generation.paged_model_provider import PagedModelProvider
from paged_kv.integrations.server.generation.sampling import Sampling


class SingleRow:
    """One job at a time, its choices one after the other. All of this runs on the generation
    thread.

    Args:
        provider: has loaded the model.
        options: mlx-lm's.
        stream: of MLX.
    """

    def __init__(
        self, provider: PagedModelProvider, options: argparse.Namespace, stream: mx.Stream
    ) -> None:
        self._provider = provider
        self._options = options
        self._stream = stream
        self._stops = make_stop_sequences(provider.tokenizer)
        self._job: Job | None = None
        self._dropped: set[int] = set()
        self._events: Happened = iter(())

    def __len__(self) -> int:
        return int(self._job is not None)

    def begin(self, job: Job, prompt: Prompt, samplings: list[Sampling]) -> None:
        """Add a job; the next steps compute it. No other job may be running."""
        self._job, self._dropped = job, set()
        fetched = self._fetch(job, prompt)
        job.cached_tokens = fetched[1]
        self._events = self._choices(job, prompt, samplings, fetched)

    def step(self) -> Happened:
        """Compute the next part of the prompt, or the next token."""
        for event in self._events:
            yield event
            return
        self._job = None

    def drop(self, job: Job, number: int | None = None) -> None:
        """Stop a job, or one of its choices."""
        if self._job is job and number is None:
            self.close()
        elif self._job is job and number is not None:
            self._dropped.add(number)

    def holds(self, job: Job) -> bool:
        """Whether the job has an unfinished choice."""
        return self._job is job

    def close(self) -> None:
        """Drop the job."""
        self._job, self._events = None, iter(())

    def _choices(
        self, job: Job, prompt: Prompt, samplings: list[Sampling], fetched: tuple[list[Any], int]
    ) -> Happened:
        for number, sampling in enumerate(samplings, job.first_choice):
            cache, cached = fetched
            # Drop this reference, so that only the choice holds the pages inserted at its end.
            fetched = [], 0
            for token in self._choice(job, prompt, number, sampling, cache, cached):
                yield token
                if number in self._dropped:
                    break
            if number < job.first_choice + job.choices - 1:
                fetched = self._fetch(job, prompt)

    def _fetch(self, job: Job, prompt: Prompt) -> tuple[list[Any], int]:
        provider = self._provider
        cache, cached = provider.reuse.fetch(prompt.cache_key, job.salt)
        if cache is None:
            cache = make_prompt_cache(provider.model)
        return cache, cached

    def _choice(
        self,
        job: Job,
        prompt: Prompt,
        number: int,
        sampling: Sampling,
        cache: list[Any],
        cached: int,
    ) -> Happened:
        told = list(prompt.cache_key)
        embeddings = self._embeddings(prompt, cached)
        if embeddings is None:
            for done in self._read(prompt.tokens, cached, cache):
                cached = done
                yield job, Progress(done, len(prompt.tokens))
        stops = self._stops.matcher()
        for response in self._generate(job, prompt.tokens[cached:], cache, sampling, embeddings):
            told.append(response.token)
            if stops.advance(response.token):
                response.finish_reason = "stop"
            job.generated_tokens += 1
            if response.finish_reason is not None:
                # Insert before the client sees the end and drops the job.
                self._provider.reuse.insert(told, cache, job.salt)
            yield job, as_token(job, number, response)
            if response.finish_reason is not None:
                return

    def _generate(
        self, job: Job, rest: list[int], cache: list[Any], sampling: Sampling, embeddings: Any
    ) -> Iterator[Any]:
        options = self._options
        return stream_generate(
            self._provider.model,
            self._provider.tokenizer,
            rest,
            max_tokens=job.arguments.max_tokens,
            stream=self._stream,
            sampler=sampling.sampler,
            logits_processors=sampling.processors,
            prompt_cache=cache,
            prefill_step_size=options.prefill_step_size,
            kv_bits=options.kv_bits,
            kv_group_size=options.kv_group_size,
            quantized_kv_start=options.quantized_kv_start,
            **({"input_embeddings": embeddings} if embeddings is not None else {}),
        )

    def _read(self, tokens: list[int], start: int, cache: list[Any]) -> Iterator[int]:
        """Compute a prompt without its last token, in steps; yields the end of each. mlx-lm would
        return only at the prompt's end, and the client may leave before."""
        while start < len(tokens) - 1:
            end = min(start + self._options.prefill_step_size, len(tokens) - 1)
            self._read_step(tokens[start:end], cache)
            start = end
            yield start

    def _read_step(self, tokens: list[int], cache: list[Any]) -> None:
        model: Any = self._provider.model
        options = self._options
        with mx.stream(self._stream):
            model(mx.array([tokens]), cache=cache)
            maybe_quantize_kv_cache(
                cache,
                quantized_kv_start=options.quantized_kv_start,
                kv_group_size=options.kv_group_size,
                kv_bits=options.kv_bits,
            )
            mx.eval([layer.state for layer in cache])
        mx.clear_cache()

    def _embeddings(self, prompt: Prompt, cached: int) -> mx.array | None:
        """Embeddings of the tokens and images that are not cached; None if there are no images."""
        if prompt.vision is None:
            return None
        seen = sum(start < cached for start in prompt.vision.starts)
        pixels = prompt.vision.pixel_values[seen:]
        if not pixels:
            return None
        model: Any = self._provider.model
        embeddings: mx.array = model.embed_inputs(
            mx.array(prompt.tokens[cached:]), pixel_values=pixels
        )
        # The prompt is computed on another stream: evaluate the images first.
        mx.eval(embeddings)
        return embeddings
