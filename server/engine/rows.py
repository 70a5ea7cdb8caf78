"""Runs jobs on one loaded model: in a batch; or one job alone, with images, or of a model whose
caches cannot be batched. Nothing is drafted for that one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import generate_step, wired_limit

from paged_kv.integrations.batching.prompt_caches import compute
from paged_kv.integrations.batching.short_memory import FittingSteps
from paged_kv.integrations.grammar.constraints import CallConstraint, Constraint
from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar
from paged_kv.integrations.states.counted_states import are_ours
from paged_kv.server.engine.batched_rows import BatchedRows, Happened, as_token, hold
from paged_kv.server.engine.jobs import Begun, Event, Failed, Job, Progress, Prompt
from paged_kv.server.engine.paged_model_provider import LoadedModel, PagedModelProvider
from paged_kv.server.engine.sampling import Samplers, Sampling
from paged_kv.server.http.api_errors import APIError, wrong_value


class Rows:
    """The running jobs of a model. All of this runs on the generation thread.

    Args:
        provider: has loaded `loaded`.
        loaded: the model.
        stream: of MLX.
    """

    def __init__(
        self, provider: PagedModelProvider, loaded: LoadedModel, stream: mx.Stream
    ) -> None:
        self.loaded = loaded
        self._batch = BatchedRows(provider, loaded, stream)
        self._single = SingleRow(provider, loaded, stream)
        # The same request is to get the same answer, with a seed or without.
        self._samplers = Samplers(loaded, 0 if provider.options.cache.reproducible else None)
        self._grammars: dict[Job, list[FollowedGrammar]] = {}

    def __len__(self) -> int:
        return len(self._batch) + len(self._single)

    def can_join(self, prompt: Prompt) -> bool:
        """Whether a job may begin or wait beside those that are there: not if it or one of them
        runs alone."""
        return not len(self) or not (len(self._single) or self._is_alone(prompt))

    def begin(self, job: Job, prompt: Prompt) -> None:
        """Add a job; it begins in the next step that has room for it.

        Raises:
            APIError: 400, its sampling options or its grammar do not work.
        """
        samplings = self._samplers.of(job.arguments, job.choices)
        if later := job.ending.processors(self.loaded.tokenizer, len(prompt.tokens)):
            samplings = [replace(each, processors=[*each.processors, *later]) for each in samplings]
        if grammars := _begun_grammars(self.loaded, job, prompt):
            samplings = [
                each.within(grammar) for each, grammar in zip(samplings, grammars, strict=True)
            ]
            self._grammars[job] = grammars
        rows = self._single if self._is_alone(prompt) else self._batch
        rows.begin(job, prompt, samplings)

    def step(self) -> Happened:
        """Compute a token of every choice, and a part of the unfinished prompts."""
        for rows in (self._batch, self._single):
            if len(rows):
                yield from rows.step()
        for job, grammars in list(self._grammars.items()):
            if error := next((each.error for each in grammars if each.error is not None), None):
                self.drop(job)
                field = None if job.constraint is None else job.constraint.field
                stopped = f"{field} is too large or too slow to follow: {error}"
                yield job, Failed(wrong_value(stopped, field))

    def drop(self, job: Job, number: int | None = None) -> None:
        """Stop a job, or one of its choices."""
        self._batch.drop(job, number)
        self._single.drop(job, number)
        if number is None:
            self._grammars.pop(job, None)

    def holds(self, job: Job) -> bool:
        """Whether the job has an unfinished choice."""
        return self._batch.holds(job) or self._single.holds(job)

    def close(self) -> None:
        """Drop all jobs."""
        self._batch.close()
        self._single.close()

    def _is_alone(self, prompt: Prompt) -> bool:
        return not self.loaded.is_batchable or prompt.media is not None


def model_constraint(
    requested: Constraint | CallConstraint | None, loaded: LoadedModel | None
) -> Constraint | None:
    """What a request's constraint means for its model. What depends on the model is None while
    that is not loaded.

    Raises:
        APIError: 400, the model does not call tools as is asked.
    """
    if requested is None or isinstance(requested, Constraint):
        return requested
    try:
        return None if loaded is None else requested.for_model(loaded.tokenizer)
    except ValueError as error:
        raise wrong_value(f"{requested.field}: {error}", requested.field) from None


def _begun_grammars(loaded: LoadedModel, job: Job, prompt: Prompt) -> list[FollowedGrammar]:
    """The grammar of each choice, at its beginning; none if any text will do. It is compiled here
    if it was not before, as for a model that was loaded for this job.

    Raises:
        APIError: 400, it does not compile, or the model's answers have a form of their own.
    """
    constraint = model_constraint(job.constraint, loaded)
    if constraint is None:
        return []
    compiled = job.compiled
    try:
        if compiled is None or not loaded.grammars.made(compiled):
            compiled = loaded.grammars.compiled(constraint)
    except APIError:
        if constraint.is_optional:
            return []
        raise
    try:
        place = constraint.place(loaded.tokenizer, prompt.initial_state)
    except ValueError as error:
        raise wrong_value(f"{constraint.field}: {error}", constraint.field) from None
    return [compiled.begin(**place) for _ in range(job.choices)]


class PromptStart(NamedTuple):
    """Where the computation of a prompt begins.

    Attributes:
        model: computes the prompt's steps: the loaded model, or `PromptSteps`.
        cache: holds the first `cached` tokens.
        ends: of the parts of the prompt that other prompts may share: a step ends at each.
    """

    model: Callable[..., mx.array]
    cache: list[Any]
    cached: int
    ends: list[int]

    def steps(
        self, tokens: list[int], most: int, stream: mx.Stream, *, can_repeat: bool
    ) -> Iterator[int]:
        """Compute a prompt up to the last of the ends; yields the end of each step.

        Args:
            tokens: of the prompt.
            most: the most tokens of a step.
            stream: of MLX.
            can_repeat: whether a step that there was no memory for can be undone.
        """
        done, sizes = self.cached, FittingSteps(most)
        for border in self.ends:
            while done < border:
                left = tokens[done : min(done + most, border)]
                step = partial(self._step, stream, left)
                if can_repeat:
                    done += sizes.take(step, len(left))
                else:
                    step(len(left))
                    done += len(left)
                # What cannot be undone once a step is computed.
                with mx.stream(stream):
                    mx.eval([layer.state for layer in self.cache])
                mx.clear_cache()
                yield done

    def _step(self, stream: mx.Stream, tokens: list[int], count: int) -> None:
        """Compute the first `count` of these next tokens of a prompt."""
        with mx.stream(stream):
            self.model(mx.array([tokens[:count]]), cache=self.cache)
            compute(self.cache)


class _Sampled(NamedTuple):
    """A token, its log probabilities [vocabulary], and why it is the last one, if it is."""

    token: int
    logprobs: mx.array
    finish_reason: str | None


class SingleRow:
    """One job at a time, its choices one after the other. All of this runs on the generation
    thread.

    Args:
        provider: has loaded `loaded`.
        loaded: the model.
        stream: of MLX.
    """

    def __init__(
        self, provider: PagedModelProvider, loaded: LoadedModel, stream: mx.Stream
    ) -> None:
        self._loaded = loaded
        self._provider = provider
        (self._factory, *_) = provider.factories
        self._stream = stream
        self._job: Job | None = None
        self._dropped: set[int] = set()
        self._events: Happened = iter(())

    def __len__(self) -> int:
        return int(self._job is not None)

    def begin(self, job: Job, prompt: Prompt, samplings: list[Sampling]) -> None:
        """Add a job; the next steps compute it. No other job may be running.

        Raises:
            APIError: 400, the model cannot read its images.
        """
        start = self._start(job, prompt)
        job.cached_tokens = start.cached
        self._job, self._dropped = job, set()
        begun: list[tuple[Job, Event]] = [(job, Begun(job, self._loaded))]
        self._events = chain(begun, self._choices(job, prompt, samplings, [start]))

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
        self, job: Job, prompt: Prompt, samplings: list[Sampling], started: list[PromptStart]
    ) -> Happened:
        for number, sampling in enumerate(samplings, job.first_choice):
            # Taken out, so that only the choice holds the pages that are inserted at its end.
            start = started.pop() if started else self._start(job, prompt)
            events = self._choice(job, prompt, number, sampling, start)
            del start
            for event in events:
                yield event
                if number in self._dropped:
                    break

    def _start(self, job: Job, prompt: Prompt) -> PromptStart:
        model: Any = self._provider.model
        lengths = accumulate(len(segment) for segment in prompt.segments)
        known = prompt.cache_key
        parting = self._factory.parting(known, salt=job.salt)
        ends = sorted({*lengths, parting} - {0, len(prompt.tokens)})
        cache, cached = self._factory.fetch_cache(known, salt=job.salt)
        hold(self._provider.reuse, prompt, job.salt)
        if prompt.media is None:
            return PromptStart(model, cache, cached, ends)
        try:
            steps = prompt.media.begin(model, cached)
        except ValueError as error:
            raise wrong_value(f"the model cannot read these images: {error}", "messages") from error
        if steps.start < cached:
            # Nothing is found of one token: this cache is empty.
            cache, _ = self._factory.fetch_cache(known[:1], salt=job.salt)
        return PromptStart(steps, cache, steps.start, ends if steps.in_parts else [])

    def _choice(
        self, job: Job, prompt: Prompt, number: int, sampling: Sampling, start: PromptStart
    ) -> Happened:
        computed, cache = list(prompt.cache_key), start.cache
        for done in self._read(start, prompt.tokens):
            if done in start.ends:
                # Of a copy of the list, which is emptied.
                self._keep(computed[:done], [*cache], job, prompt)
            yield job, Progress(done, len(prompt.tokens))
        stops = job.ending.stop_sequences(self._provider.tokenizer).matcher()
        for response in self._generate(job, start, prompt.tokens, sampling):
            computed.append(response.token)
            if stops.advance(response.token):
                response = response._replace(finish_reason="stop")
            job.generated_tokens += 1
            if response.finish_reason is not None:
                # Insert before the client sees the end and drops the job.
                self._keep(computed, cache, job, prompt)
            yield job, as_token(job, number, response)
            if response.finish_reason is not None:
                return

    def _keep(self, tokens: list[int], cache: list[Any], job: Job, prompt: Prompt) -> None:
        self._provider.reuse.insert(tokens, cache, job.salt, job.session)
        hold(self._provider.reuse, prompt, job.salt)

    def _generate(
        self, job: Job, start: PromptStart, tokens: list[int], sampling: Sampling
    ) -> Iterator[_Sampled]:
        """The tokens that follow a prompt, of which the cache holds all but the last."""
        most, model = job.arguments.max_tokens, start.model
        steps: Any = generate_step(
            mx.array(tokens[-1:]),
            model,
            self._stream,
            max_tokens=most,
            sampler=sampling.sampler,
            logits_processors=[_behind(tokens[:-1], each) for each in sampling.processors],
            prompt_cache=start.cache,
            prefill_step_size=self._provider.prompt_step,
        )
        with wired_limit(model, [self._stream]):
            for count, (token, logprobs) in enumerate(steps, 1):
                yield _Sampled(token, logprobs, "length" if count == most else None)

    def _read(self, start: PromptStart, tokens: list[int]) -> Iterator[int]:
        """Compute a prompt without its last token, in steps; yields the end of each. mlx-lm would
        return only at the prompt's end, and the client may leave before."""
        # What begins with images counts its steps, and cannot repeat one.
        can_repeat = start.model is self._provider.model and are_ours(start.cache)
        whole = start._replace(ends=[*start.ends, len(tokens) - 1])
        return whole.steps(tokens, self._provider.prompt_step, self._stream, can_repeat=can_repeat)


def _behind(tokens: list[int], processor: Any) -> Any:
    """A logits processor that also sees the prompt's tokens, which the generator is not given."""
    prompt = mx.array(tokens, mx.int32)

    def process(seen: mx.array, logits: mx.array) -> mx.array:
        processed: mx.array = processor(mx.concatenate([prompt, seen]), logits)
        return processed

    return process
