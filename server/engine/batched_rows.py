"""Runs the choices of several jobs as one batch of mlx-lm's BatchGenerator."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from paged_kv.integrations.batching.preemption import attach
from paged_kv.integrations.batching.rows import Request
from paged_kv.integrations.batching.short_memory import Shortages
from paged_kv.integrations.grammar.masked_steps import MaskedBatchGenerator
from paged_kv.integrations.mlx_lm_internals import GeneratorParts
from paged_kv.integrations.speculation.batch import RowOptions
from paged_kv.integrations.speculation.generator import SpeculativeBatchGenerator
from paged_kv.prefix.keeping import Unstored
from paged_kv.server.engine.jobs import (
    Begun,
    Empty,
    Event,
    Failed,
    Job,
    Progress,
    Prompt,
    Token,
    TopToken,
)
from paged_kv.server.engine.paged_model_provider import LoadedModel, PagedModelProvider
from paged_kv.server.engine.prompt_fetcher import PromptReuse
from paged_kv.server.engine.prompt_scores import PromptScores, ScoredPrompts
from paged_kv.server.engine.sampling import Sampling
from paged_kv.server.http.api_errors import no_memory

Happened = Iterator[tuple[Job, Event]]


@dataclass(frozen=True, eq=False)
class _Row:
    """One sequence of the batch.

    Attributes:
        number: of the choice, in the request.
        followers: the sampling of the other choices, while they wait for this one's prompt.
        scores: of the tokens of its prompt, if the job asks for them.
    """

    job: Job
    prompt: Prompt
    number: int
    followers: list[Sampling]
    scores: PromptScores | None = None


class BatchedRows:
    """The sequences of one model. All of this runs on the generation thread.

    A job's prompt is computed for its first choice. The others fork it before its last token. A job
    waits in the batch's queue until it can begin.

    Args:
        provider: has loaded `loaded`.
        loaded: the model.
        stream: of MLX.
    """

    def __init__(
        self, provider: PagedModelProvider, loaded: LoadedModel, stream: mx.Stream
    ) -> None:
        options = provider.options
        self._loaded = loaded
        self._reuse = provider.reuse
        self._tokenizer: Any = provider.tokenizer
        self._rows: dict[int, _Row] = {}
        self._begun: list[Job] = []  # in this step
        self._reading: dict[int, PromptScores | None] = {}
        sizes: dict[str, Any] = {
            "completion_batch_size": options.decode_concurrency,
            "prefill_batch_size": min(options.prompt_concurrency, options.decode_concurrency),
            "prefill_step_size": provider.prompt_step,
        }
        self._generator: Any = (
            MaskedBatchGenerator(provider.model, stream=stream, **sizes)
            if provider.draft is None
            else SpeculativeBatchGenerator(
                provider.model, provider.draft, options_of=self._drafting, stream=stream, **sizes
            )
        )
        parts = GeneratorParts(self._generator)
        parts.reading = ScoredPrompts(parts.reading, self._reading)
        (self._factory, *_) = provider.factories
        self._factory.decode_share = options.decode_share
        self._preemption = attach(self._generator, self._factory)
        self._preemption.reserve_share = options.admission
        shortages = Shortages.of(self._generator)
        assert shortages is not None, "`attach` makes them"
        self._failed = shortages.failed

    def __len__(self) -> int:
        return len(self._rows)

    def begin(self, job: Job, prompt: Prompt, samplings: list[Sampling]) -> None:
        """Add a job; the next steps compute it when there is room."""
        first, *others = samplings
        scores = None
        if job.prompt_logprobs is not None:
            scores = PromptScores(job, prompt.tokens, self._loaded.vocab_size)
        row = _Row(job, prompt, job.first_choice, others, scores)
        uid = self._insert(row, self._factory.make_cache(), [], prompt.segments, first)
        self._preemption.begin_later(uid)

    def _record_begun(self, uid: int, cached: int) -> None:
        """Note that a job begins with so many tokens of its prompt cached."""
        row = self._rows[uid]
        hold(self._reuse, row.prompt, row.job.salt)
        row.job.cached_tokens = cached
        self._begun.append(row.job)
        if cached == len(row.prompt.tokens) - 1:
            self._fork(uid)

    def step(self) -> Happened:
        """Begin what there is room for, compute one token of every choice, and a part of the
        unfinished prompts."""
        read, sampled = self._generator.next()
        begun, self._begun = self._begun, []
        yield from ((job, Begun(job, self._loaded)) for job in begun)
        for response in read:
            yield from self._note_read(response)
        for response in sampled:
            yield from self._note_sampled(response)
        while self._failed:
            uid, _ = self._failed.popitem()
            yield from self._note_failed(uid)

    def drop(self, job: Job, number: int | None = None) -> None:
        """Stop a job, or one of its choices; its computed prefix is cached for reuse."""
        uids = [
            uid
            for uid, row in self._rows.items()
            if row.job is job and number in (None, row.number)
        ]
        caches = self._generator.remove(uids, return_prompt_caches=True)
        for uid in uids:
            row = self._rows.pop(uid)
            self._reading.pop(uid, None)
            cache, tokens = caches.pop(uid)
            if tokens:
                self._keep(row, tokens, cache)

    def holds(self, job: Job) -> bool:
        """Whether the job has an unfinished choice."""
        return any(row.job is job for row in self._rows.values())

    def close(self) -> None:
        """Drop all sequences."""
        self._rows.clear()
        self._preemption.requests.clear()  # they refer to this object, which holds the caches
        self._generator.close()

    def _insert(
        self,
        row: _Row,
        cache: list[Any],
        known: list[int],
        rest: list[list[int]],
        sampling: Sampling,
        first: int | None = None,
    ) -> int:
        """Add a choice, whose job's first one has the uid `first` if it is another."""
        (uid,) = self._generator.insert_segments(
            segments=[list(rest)],
            max_tokens=[row.job.arguments.max_tokens or 1],
            caches=[cache],
            all_tokens=[known],
            samplers=[sampling.sampler],
            logits_processors=[sampling.processors],
            stop_sequences=[row.job.ending.stop_sequences(self._tokenizer)],
        )
        job, salt = row.job, row.job.salt
        if row.scores is not None:
            # What is cached has no logits: the prompt finds only what it has computed itself.
            salt = Unstored(("scored", job.number))
        begun = partial(self._record_begun, uid)
        keep = partial(self._keep, row)
        request = Request(job.priority, first, salt, job.session, job.since, begun, keep)
        self._preemption.requests[uid] = request
        self._rows[uid] = row
        self._reading[uid] = row.scores
        return int(uid)

    def _fork(self, uid: int) -> None:
        """Begin the choices that wait for a prompt, once all but its last token is computed."""
        row = self._rows[uid]
        if not row.followers:
            return
        cache, known = self._generator.extract_cache([uid])[uid]
        for number, sampling in enumerate(row.followers, row.number + 1):
            other = _Row(row.job, row.prompt, number, [])
            last = [row.prompt.tokens[-1:]]
            self._insert(other, copy.deepcopy(cache), list(known), last, sampling, first=uid)
        row.followers.clear()

    def _note_read(self, response: Any) -> Happened:
        uid, row = response.uid, self._rows[response.uid]
        if uid not in self._reading:
            return  # a preempted choice, whose tokens are computed again
        done, total = response.progress
        if response.end_of_prompt:
            self._reading.pop(uid, None)
        if done == total - 1:
            self._fork(uid)
        if row.number == row.job.first_choice:
            yield row.job, Progress(row.job.cached_tokens + done, row.job.cached_tokens + total)
        if not row.job.arguments.max_tokens and done >= total - 1:
            # Only its prompt was to be scored.
            self.drop(row.job)
            yield from ((row.job, Empty(number)) for number in row.job.numbers)

    def _drafting(self, uid: int) -> RowOptions:
        job = self._rows[uid].job
        return RowOptions(job.arguments.num_draft_tokens, job.salt, job.speculation)

    def _note_sampled(self, response: Any) -> Happened:
        row = self._rows.get(response.uid)
        if row is None:
            return  # dropped after an earlier token of this step
        row.job.generated_tokens += 1
        yield row.job, as_token(row.job, row.number, response)
        if response.finish_reason is not None:
            del self._rows[response.uid]

    def _note_failed(self, uid: int) -> Happened:
        """End the job of a choice that there is no memory for, and that the generator has removed;
        unless it was dropped since."""
        row = self._rows.pop(uid, None)
        if row is not None:
            self._reading.pop(uid, None)
            self.drop(row.job)
            yield row.job, Failed(no_memory())

    def _keep(self, row: _Row, tokens: list[int], cache: list[Any]) -> None:
        self._reuse.insert(tokens, cache, row.job.salt, row.job.session)
        hold(self._reuse, row.prompt, row.job.salt)


def hold(reuse: PromptReuse, prompt: Prompt, salt: Hashable) -> None:
    """Hold what is cached of a prompt as long as its client asks for."""
    for each in prompt.held:
        reuse.hold(prompt.cache_key[: each.num_tokens], each.seconds, salt)


def as_token(job: Job, number: int, response: Any) -> Token:
    """The event for a token that mlx-lm generated for a choice."""
    options = job.arguments
    logprob = response.logprobs[response.token].item() if options.logprobs else None
    top = _top(response.logprobs, options.top_logprobs)
    return Token(number, response.token, logprob, top, response.finish_reason)


def _top(logprobs: mx.array, count: int) -> tuple[TopToken, ...]:
    if count <= 0:
        return ()
    best: Any = mx.argpartition(-logprobs, kth=count - 1)[:count]
    values: Any = logprobs[best]
    pairs = zip(best.tolist(), values.tolist(), strict=True)
    return tuple(sorted([TopToken(*pair) for pair in pairs], key=lambda each: -each.logprob))
