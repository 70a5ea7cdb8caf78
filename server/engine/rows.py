"""Runs jobs on one loaded model: as one batch of BatchGenerator of mlx-lm, or one job alone. Scores
tokens of prompts where the batch computes them: what the steps of a prompt compute anyway says how
likely each of its tokens was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch

from paged_kv.integrations.batch_steps import part_of
from paged_kv.integrations.batching.preemption import attach
from paged_kv.integrations.batching.prompt_caches import compute, joined
from paged_kv.integrations.batching.rows import Request
from paged_kv.integrations.batching.short_memory import taken_out
from paged_kv.integrations.grammar.processor import GrammarProcessor, MaskedBatchGenerator
from paged_kv.integrations.grammar.vocabulary import FollowedGrammar
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
    ScoredToken,
    TopToken,
)
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.engine.sampling import Samplers, Sampling, model_constraint
from paged_kv.server.engine.single_row import SingleRow, as_token, hold
from paged_kv.server.http.api_errors import APIError, no_memory, wrong_value

# Numbers of the logits of a step, which are kept in float32 for a moment: 256 MiB. That is 441
# tokens with a vocabulary of 152,000, where the default step has 2,048.
MOST_LOGITS = 1 << 26


class PromptScores:
    """Scores the tokens of a job's prompt, part by part, into `job.scored`. Of each part the scores
    and the likeliest tokens are kept, and not the logits.
    """

    def __init__(self, job: Job, tokens: list[int], vocab_size: int) -> None:
        self._job = job
        self._tokens = tokens
        self.step_tokens = max(1, MOST_LOGITS // vocab_size)
        job.scored = [ScoredToken(tokens[0])]

    def resume(self, computed: int) -> None:
        """Forget the scores behind the first `computed` tokens: a prompt that was preempted may
        compute the others again."""
        del self._job.scored[computed + 1 :]

    def step(self, model: Any, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits of the model's step with the next tokens [1, N]. Scores those that follow."""
        logits: mx.array = model(tokens, cache=cache)
        compute(cache)  # A step that fails from here on would be repeated, and its scores with it.
        self._score(logits)
        return logits

    def _score(self, logits: mx.array) -> None:
        """Score the next tokens, of the logits [1, N, vocabulary] behind the last scored token and
        the N - 1 after it."""
        scored, count = self._job.scored, self._job.prompt_logprobs or 0
        at = len(scored)
        _, length, vocab_size = logits.shape
        tokens = self._tokens[at : at + length]
        logprobs = logits[0].astype(mx.float32)
        logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
        own = mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1)
        ranks = mx.sum(logprobs > own, axis=-1) + 1
        best = mx.argpartition(logprobs, kth=-max(1, count), axis=-1)[:, vocab_size - count :]
        values = mx.take_along_axis(logprobs, best, axis=-1)
        mx.eval(own, ranks, best, values)
        lists: list[Any] = [each.tolist() for each in (own[:, 0], ranks, best, values)]
        for token, logprob, rank, ids, logprobs_of_ids in zip(tokens, *lists, strict=True):
            top = sorted(map(TopToken, ids, logprobs_of_ids), key=lambda each: -each.logprob)
            scored.append(ScoredToken(token, logprob, rank, tuple(top)))


class ScoredPrompts(PromptProcessingBatch):
    """mlx-lm's batch of the prompts that are being computed, of which some are scored. Those take
    steps of their own, with few enough tokens for their logits: a model computes no logits of a
    prompt that nobody asks for, and in a common step it would compute them of all.

    It takes the place of the stock batch. `scores` has what scores a prompt by uid.
    """

    def __init__(
        self, stock: PromptProcessingBatch, scores: Mapping[int, PromptScores | None]
    ) -> None:
        vars(self).update(vars(stock))
        self._scores = scores

    def prompt(self, tokens: list[list[int]]) -> None:
        """Compute the next tokens of each prompt."""
        scored = [row for row, uid in enumerate(self.uids) if self._scores.get(uid) is not None]
        if not scored:
            super().prompt(tokens)
            return
        others = [row for row in range(len(tokens)) if row not in scored]
        kept: list[Any] = []
        for rows in ([others] if others else []) + [[row] for row in scored]:
            kept = joined(kept, self._computed(rows, [tokens[row] for row in rows]))
        order = [*others, *scored]
        self.prompt_cache = taken_out(kept, [order.index(row) for row in range(len(tokens))])

    def _computed(self, rows: list[int], tokens: list[list[int]]) -> list[Any]:
        """The caches of some prompts behind their next tokens."""
        part = part_of(self, taken_out(self.prompt_cache, rows), rows)
        scores = self._scores.get(part.uids[0])
        if scores is not None:
            scores.resume(len(part.tokens[0]))
            part.model = partial(scores.step, self.model)
            part.prefill_step_size = min(self.prefill_step_size, scores.step_tokens)
        super(ScoredPrompts, part).prompt(tokens)
        return list(part.prompt_cache)


Happened = Iterator[tuple[Job, Event]]


@dataclass(frozen=True, eq=False)
class _Row:
    """One sequence of the batch."""

    job: Job
    prompt: Prompt
    number: int  # of the choice, in the request
    # The sampling of the other choices, while they wait for this one's prompt.
    followers: list[Sampling]
    scores: PromptScores | None = None  # of the tokens of its prompt, if the job asks for them


class Rows:
    """The running jobs of a model. All of this runs on the generation thread.

    A job's prompt is computed for its first choice. The others fork it before its last token. A job
    waits in the batch's queue until it can begin. A job with images, or of a model whose caches
    cannot be batched, runs alone, and nothing is drafted for it.
    """

    def __init__(self, provider: PagedModelProvider) -> None:
        options, stream = provider.options, mx.default_stream(mx.default_device())
        self.loaded = loaded = provider.described
        self._provider = provider
        self._rows: dict[int, _Row] = {}
        self._single: SingleRow | None = None
        self._begun: list[Job] = []  # in this step
        self._reading: dict[int, PromptScores | None] = {}
        self._grammars: dict[Job, list[FollowedGrammar]] = {}
        # The same request is to get the same answer, with a seed or without.
        seed = 0 if options.cache.reproducible else None
        self._samplers = Samplers(loaded.tokenizer, loaded.vocab_size, seed)
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
        self._failed = self._preemption.shortages.failed

    def __len__(self) -> int:
        return len(self._rows) + (self._single is not None)

    def can_join(self, prompt: Prompt) -> bool:
        """Whether a job may begin or wait beside those that are there: not if it or one of them
        runs alone."""
        return self._single is None and not self._is_alone(prompt)

    def begin(self, job: Job, prompt: Prompt) -> None:
        """Add a job; it begins in the next step that has room for it.

        Raises:
            APIError: 400, its sampling options or its grammar do not work, or the model cannot read
                its images.
        """
        samplings = self._samplers.of(job.arguments, job.choices)
        later = job.ending.processors(self.loaded.tokenizer, len(prompt.tokens))
        if grammars := self._begun_grammars(job, prompt):
            self._grammars[job] = grammars
        for number, sampling in enumerate(samplings):
            followed = grammars[number : number + 1]
            sampling.processors.extend([*later, *map(GrammarProcessor, followed)])
        if self._is_alone(prompt):
            self._single = SingleRow(self._provider, job, prompt, samplings)
            return
        first, *others = samplings
        scores = None
        if job.prompt_logprobs is not None:
            scores = PromptScores(job, prompt.tokens, self.loaded.vocab_size)
        row = _Row(job, prompt, job.first_choice, others, scores)
        uid = self._insert(row, self._factory.make_cache(), [], prompt.segments, first)
        self._preemption.begin_later(uid)

    def step(self) -> Happened:
        """Begin what there is room for, compute one token of every choice, and a part of the
        unfinished prompts."""
        if self._single is None:
            read, sampled = self._generator.next()
            begun, self._begun = self._begun, []
            yield from ((job, Begun(job, self.loaded)) for job in begun)
            for response in read:
                yield from self._note_read(response)
            for response in sampled:
                yield from self._note_sampled(response)
            while self._failed:
                # There is no memory for a choice, and the generator has removed it.
                uid, _ = self._failed.popitem()
                if (row := self._rows.pop(uid, None)) is not None:  # not dropped since
                    self._reading.pop(uid, None)
                    self.drop(row.job)
                    yield row.job, Failed(no_memory())
        elif (event := next(self._single.events, None)) is not None:
            yield self._single.job, event
        else:
            self._single = None
        for job, grammars in list(self._grammars.items()):
            if error := next((each.error for each in grammars if each.error is not None), None):
                self.drop(job)
                field = None if job.constraint is None else job.constraint.field
                stopped = f"{field} is too large or too slow to follow: {error}"
                yield job, Failed(wrong_value(stopped, field))

    def drop(self, job: Job, number: int | None = None) -> None:
        """Stop a job, or one of its choices. What a batch has computed of it is cached, to be
        reused."""
        if number is None:
            self._grammars.pop(job, None)
        if self._single is not None and self._single.job is job:
            if number is None:
                self._drop_single()
            else:
                self._single.dropped.add(number)
            return
        own = [(uid, row) for uid, row in self._rows.items() if row.job is job]
        uids = [uid for uid, row in own if number in (None, row.number)]
        caches = self._generator.remove(uids, return_prompt_caches=True)
        for uid in uids:
            row = self._rows.pop(uid)
            self._reading.pop(uid, None)
            cache, tokens = caches.pop(uid)
            if tokens:
                self._keep(row, tokens, cache)

    def holds(self, job: Job) -> bool:
        """Whether the job has an unfinished choice."""
        if self._single is not None and self._single.job is job:
            return True
        return any(row.job is job for row in self._rows.values())

    def close(self) -> None:
        """Drop all jobs."""
        self._drop_single()
        self._rows.clear()
        self._preemption.requests.clear()  # they refer to this object, which holds the caches
        self._generator.close()

    def _drop_single(self) -> None:
        if self._single is not None:
            self._single.events.close()  # else the caches wait for the garbage collector
            self._single = None

    def _is_alone(self, prompt: Prompt) -> bool:
        return not self.loaded.is_batchable or prompt.media is not None

    def _begun_grammars(self, job: Job, prompt: Prompt) -> list[FollowedGrammar]:
        """The grammar of each choice, at its beginning; none if any text will do. It is compiled
        here if it was not before, as for a model that was loaded for this job.

        Raises:
            APIError: 400, it does not compile, or the model's answers have a form of their own.
        """
        constraint = model_constraint(job.constraint, self.loaded.tokenizer)
        if constraint is None:
            return []
        compiled, grammars = job.compiled, self.loaded.grammars
        try:
            if compiled is None or not grammars.made(compiled):
                compiled = grammars.compiled(constraint)
        except APIError:
            if constraint.is_optional:
                return []
            raise
        try:
            place = constraint.place(self.loaded.tokenizer, prompt.initial_state)
        except ValueError as error:
            raise wrong_value(f"{constraint.field}: {error}", constraint.field) from None
        return [compiled.begin(**place) for _ in range(job.choices)]

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
            stop_sequences=[row.job.ending.stop_sequences(self.loaded.tokenizer)],
        )
        job, salt = row.job, row.job.salt
        if row.scores is not None:
            # What is cached has no logits: the prompt finds only what it has computed itself.
            salt = Unstored(("scored", job.number))
        begun, keep = partial(self._record_begun, uid), partial(self._keep, row)
        request = Request(job.priority, first, salt, job.session, job.since, begun, keep)
        self._preemption.requests[uid] = request
        self._rows[uid] = row
        self._reading[uid] = row.scores
        return int(uid)

    def _record_begun(self, uid: int, cached: int) -> None:
        row = self._rows[uid]
        hold(self._provider.reuse, row.prompt, row.job.salt)
        row.job.cached_tokens = cached
        self._begun.append(row.job)
        if cached == len(row.prompt.tokens) - 1:
            self._fork(uid)

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
        reason = response.finish_reason
        yield row.job, as_token(row.job, row.number, response.token, response.logprobs, reason)
        if reason is not None:
            del self._rows[response.uid]

    def _keep(self, row: _Row, tokens: list[int], cache: list[Any]) -> None:
        self._provider.reuse.insert(tokens, cache, row.job.salt, row.job.session)
        hold(self._provider.reuse, row.prompt, row.job.salt)
