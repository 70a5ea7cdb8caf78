"""Runs one job alone, its choices one after the other. Has what batches and next turns share with
it: the steps of a prompt, what is held of it, and the events for tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import generate_step, wired_limit
from mlx_lm.server import Vision

from paged_kv.integrations.batching.prompt_caches import compute
from paged_kv.integrations.batching.short_memory import FittingSteps
from paged_kv.integrations.states.counted_states import are_ours
from paged_kv.server.engine.jobs import Begun, Event, Job, Progress, Prompt, Token, TopToken
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.engine.prompt_fetcher import PromptReuse
from paged_kv.server.engine.sampling import Sampling
from paged_kv.server.http.api_errors import wrong_value


class PromptStart(NamedTuple):
    """Where the computation of a prompt begins."""

    # Computes the prompt's steps: the loaded model, or `PromptSteps`.
    model: Callable[..., mx.array]
    cache: list[Any]  # holds the first `cached` tokens
    cached: int
    ends: list[int]  # of the parts of the prompt that other prompts may share: a step ends at each

    def steps(self, tokens: list[int], most: int, *, can_repeat: bool) -> Iterator[int]:
        """Compute a prompt up to the last of the ends; yields the end of each step.

        Args:
            most: the most tokens of a step.
            can_repeat: whether a step that there was no memory for can be undone.
        """
        done, sizes = self.cached, FittingSteps(most)
        for border in self.ends:
            while done < border:
                left = tokens[done : min(done + most, border)]
                step = partial(self._step, left)
                if can_repeat:
                    done += sizes.take(step, len(left))
                else:
                    step(len(left))
                    done += len(left)
                # What cannot be undone once a step is computed.
                mx.eval([layer.state for layer in self.cache])
                mx.clear_cache()
                yield done

    def _step(self, tokens: list[int], count: int) -> None:
        """Compute the first `count` of these next tokens of a prompt."""
        self.model(mx.array([tokens[:count]]), cache=self.cache)
        compute(self.cache)


class SingleRow:
    """A job that runs alone. All of this runs on the generation thread.

    Args:
        provider: has loaded the model.
        samplings: of the job's choices.

    Raises:
        APIError: 400, the model cannot read its images.

    Attributes:
        dropped: the numbers of choices that are not wanted any more.
        events: each computes the next part of the prompt, or the next token.
    """

    def __init__(
        self, provider: PagedModelProvider, job: Job, prompt: Prompt, samplings: list[Sampling]
    ) -> None:
        self.job = job
        self.dropped: set[int] = set()
        self._prompt = prompt
        self._provider = provider
        start = self._start()
        job.cached_tokens = start.cached
        self.events = self._choices(samplings, [start])

    def _choices(self, samplings: list[Sampling], started: list[PromptStart]) -> Generator[Event]:
        yield Begun(self.job, self._provider.described)
        for number, sampling in enumerate(samplings, self.job.first_choice):
            # Taken out, so that only the choice holds the pages that are inserted at its end.
            start = started.pop() if started else self._start()
            events = self._choice(number, sampling, start)
            del start
            for event in events:
                yield event
                if number in self.dropped:
                    break

    def _start(self) -> PromptStart:
        model: Any = self._provider.model
        prompt, salt, factory = self._prompt, self.job.salt, self._provider.factories[0]
        lengths = accumulate(len(segment) for segment in prompt.segments)
        known = prompt.cache_key
        ends = sorted({*lengths, factory.parting(known, salt=salt)} - {0, len(prompt.tokens)})
        cache, cached = factory.fetch_cache(known, salt=salt)
        hold(self._provider.reuse, prompt, salt)
        if prompt.media is None:
            return PromptStart(model, cache, cached, ends)
        try:
            steps = prompt.media.begin(model, cached)
        except ValueError as error:
            raise wrong_value(f"the model cannot read these images: {error}", "messages") from error
        if steps.start < cached:
            # Nothing is found of one token: this cache is empty.
            cache, _ = factory.fetch_cache(known[:1], salt=salt)
        return PromptStart(steps, cache, steps.start, ends if steps.in_parts else [])

    def _choice(self, number: int, sampling: Sampling, start: PromptStart) -> Iterator[Event]:
        tokens, computed, cache = self._prompt.tokens, [*self._prompt.cache_key], start.cache
        for done in self._read(start):
            if done in start.ends:
                # Of a copy of the list, which is emptied.
                self._keep(computed[:done], [*cache])
            yield Progress(done, len(tokens))
        job, most, model = self.job, self.job.arguments.max_tokens, start.model
        stops = job.ending.stop_sequences(self._provider.described.tokenizer).matcher()
        stream = mx.default_stream(mx.default_device())
        steps: Any = generate_step(
            mx.array(tokens[-1:]),
            model,
            stream,
            max_tokens=most,
            sampler=sampling.sampler,
            logits_processors=[_behind(tokens[:-1], each) for each in sampling.processors],
            prompt_cache=cache,
            prefill_step_size=self._provider.prompt_step,
        )
        with wired_limit(model, [stream]):
            for count, (token, logprobs) in enumerate(steps, 1):
                computed.append(token)
                reason = "length" if count == most else None
                if stops.advance(token):
                    reason = "stop"
                job.generated_tokens += 1
                if reason is not None:
                    # Insert before the client sees the end and drops the job.
                    self._keep(computed, cache)
                yield as_token(job, number, token, logprobs, reason)
                if reason is not None:
                    return

    def _read(self, start: PromptStart) -> Iterator[int]:
        """Compute a prompt without its last token, in steps; yields the end of each. mlx-lm would
        return only at the prompt's end, and the client may leave before."""
        # What begins with images counts its steps, and cannot repeat one.
        can_repeat = start.model is self._provider.model and are_ours(start.cache)
        tokens, most = self._prompt.tokens, self._provider.prompt_step
        whole = start._replace(ends=[*start.ends, len(tokens) - 1])
        return whole.steps(tokens, most, can_repeat=can_repeat)

    def _keep(self, tokens: list[int], cache: list[Any]) -> None:
        self._provider.reuse.insert(tokens, cache, self.job.salt, self.job.session)
        hold(self._provider.reuse, self._prompt, self.job.salt)


class EmbeddedImages:
    """The images of a prompt, which mlx-lm has read; see `PromptMedia`."""

    def __init__(self, tokens: list[int], vision: Vision) -> None:
        self.cache_key = vision.cache_key
        self._tokens = tokens
        self._vision = vision

    def begin(self, model: Any, cached: int) -> EmbeddedSteps:
        seen = sum(start < cached for start in self._vision.starts)
        rest = mx.array(self._tokens[cached:])
        pixels = self._vision.pixel_values[seen:]
        embeddings = model.embed_inputs(rest, pixel_values=pixels) if pixels else None
        if embeddings is not None:
            mx.eval(embeddings)  # once: each step takes its part
        return EmbeddedSteps(model, cached, embeddings)


class EmbeddedSteps:
    """A model's steps for one prompt and the tokens after it; see `PromptSteps`."""

    in_parts = True

    def __init__(self, model: Any, start: int, embeddings: mx.array | None) -> None:
        self.start = start
        self._model = model
        self._embeddings = embeddings

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        part: dict[str, mx.array] = {}
        if self._embeddings is not None:
            count = inputs.shape[1]
            part = {"input_embeddings": self._embeddings[None, :count]}
            self._embeddings = self._embeddings[count:] if count < len(self._embeddings) else None
        logits: mx.array = self._model(inputs, cache=cache, **part)
        return logits


def _behind(tokens: list[int], processor: Any) -> Any:
    """A logits processor that also sees the prompt's tokens, which the generator is not given."""
    prompt = mx.array(tokens, mx.int32)

    def process(seen: mx.array, logits: mx.array) -> mx.array:
        processed: mx.array = processor(mx.concatenate([prompt, seen]), logits)
        return processed

    return process


def hold(reuse: PromptReuse, prompt: Prompt, salt: Hashable) -> None:
    """Hold what is cached of a prompt as long as its client asks for."""
    for each in prompt.held:
        reuse.hold(prompt.cache_key[: each.num_tokens], each.seconds, salt)


def as_token(
    job: Job, number: int, token: int, logprobs: mx.array, finish_reason: str | None
) -> Token:
    """The event for a token that was generated for a choice; `logprobs` are [vocabulary]."""
    count = job.arguments.top_logprobs
    logprob: Any = logprobs[token].item() if job.arguments.logprobs else None
    top: list[TopToken] = []
    if count > 0:
        best: Any = mx.argpartition(-logprobs, kth=count - 1)[:count]
        values: Any = logprobs[best].tolist()
        top = [*map(TopToken, best.tolist(), values)]
        top.sort(key=lambda each: -each.logprob)
    return Token(number, token, logprob, tuple(top), finish_reason)
