"""mlx-lm's GenerationBatch, with drafts.

A step emits the token that the last step sampled, and samples the next one. With drafts, it
computes the drafted tokens too, and emits also those that it accepts. The next step begins, as
without drafts, with one sampled token that is not emitted yet; so BatchGenerator, and what preempts
its rows, need not know about drafts.

A drafted token is accepted if the token that the model samples in its place equals it. This is
mlx-lm's rule: the emitted token of a position is always the sampler's, so it is a sample of the
model; a draft only decides how many positions one step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import GenerationBatch
from mlx_lm.sample_utils import greedy_sampler

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.integrations.batch_steps import SampledState
from paged_kv.integrations.batching.prompt_caches import first_paged
from paged_kv.integrations.batching.short_memory import (
    Shortage,
    attempted,
    if_short_again,
    make_room,
)
from paged_kv.integrations.distributed.sharded_model import ranks_of
from paged_kv.integrations.grammar.processor import (
    MaskedBatch,
    grammar_of,
    other_processors,
    within_grammars,
)
from paged_kv.integrations.speculation.draft_lengths import Acceptance, Candidate, DraftLengths
from paged_kv.integrations.speculation.drafts import Draft, DraftRow
from paged_kv.integrations.speculation.rollback import Rollback, ragged_step

Sampler = Callable[[mx.array], mx.array]


@dataclass
class SpeculationCounts:
    """Counts of one row, or of all rows together."""

    drafts: int = 0  # steps in which tokens were drafted; vLLM's `num_drafts`
    draft_tokens: int = 0  # drafted tokens; vLLM's `num_draft_tokens`
    accepted_tokens: int = 0  # drafted tokens that the model accepted; vLLM's `num_accepted_tokens`

    def record(self, drafted: int, accepted: int) -> None:
        """Count a step of one row; one without a draft does not count."""
        if drafted:
            self.drafts += 1
            self.draft_tokens += drafted
            self.accepted_tokens += accepted


class RowOptions(NamedTuple):
    """How a row drafts."""

    num_draft_tokens: int  # the most tokens to draft in a step; 0 means none
    salt: Hashable = None  # drafts of one salt never learn from another
    # Counts the row's drafts, and maybe those of others; None makes new counts
    counts: SpeculationCounts | None = None


@dataclass(eq=False)
class _Row:
    """What a batch knows of a row besides mlx-lm's fields."""

    options: RowOptions
    state: Any  # the draft's
    counts: SpeculationCounts
    acceptance: Acceptance = field(default_factory=Acceptance)  # of what the draft proposes
    # Of what the row's grammar forces
    forced_acceptance: Acceptance = field(default_factory=Acceptance)
    is_forced: bool = False  # whether its grammar forced tokens when the last draft was asked for

    @property
    def drafting(self) -> Acceptance:
        return self.forced_acceptance if self.is_forced else self.acceptance


class _Sampled(NamedTuple):
    """What the model samples behind one row's inputs."""

    tokens: list[int]  # the accepted drafts, and the token after them
    logprobs: Sequence[mx.array]  # the model's log-probabilities [vocabulary] for each of them


# What a step with drafts computes, without an effect on its batch as yet: per row the token to emit
# and the drafted ones, what the model samples behind them, and the last of these, as mlx-lm keeps
# them.
_Verified = tuple[list[list[int]], list[_Sampled], mx.array]


class SpeculativeBatch(MaskedBatch):
    """Rows that generate, with drafts: the batch of a `SpeculativeBatchGenerator`. `next` may
    return several responses for a row, in order. `sampler` is for rows that have none, and `counts`
    are those of all rows since the beginning."""

    @dataclass
    class Response(GenerationBatch.Response):
        """mlx-lm's response, with the counts of its row until now."""

        speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    def __init__(
        self,
        model: Any,
        sampler: Sampler,
        draft: Draft,
        options_of: Callable[[int], RowOptions],
        lengths: DraftLengths,
    ) -> None:
        super().__init__(
            model=model,
            uids=[],
            inputs=mx.array([], dtype=mx.uint32),
            prompt_cache=[],
            tokens=[],
            samplers=[],
            fallback_sampler=sampler,
            logits_processors=[],
            stop_sequences=[],
            max_tokens=[],
        )
        self.counts = SpeculationCounts()
        self._draft = draft
        self._options_of = options_of
        self._lengths = lengths
        self._ranks = ranks_of(model)
        self._rows: list[_Row] = []
        # The rows of the last step, if it was without drafts.
        self._plain_rows = 0

    def extend(self, batch: GenerationBatch) -> None:
        """Extend this batch with another generation batch, whose caches can be rolled back."""
        super().extend(batch)  # type: ignore[no-untyped-call]  # mlx-lm's
        for uid in batch.uids:
            options = self._options_of(uid)
            counts = options.counts or SpeculationCounts()
            self._rows.append(_Row(options, self._draft.begin(options.salt), counts))

    def filter(self, keep: list[int]) -> None:
        super().filter(keep)
        self._rows = [self._rows[row] for row in keep]

    def next(self) -> list[GenerationBatch.Response]:
        """Emit one token of each row, and the drafted tokens that follow it and are accepted."""
        if not self.uids:
            return []
        paged = first_paged(self.prompt_cache)
        in_rings = None if paged is None else paged.pool.longest_rollback
        most = [self._draft_length(row, in_rings) for row in range(len(self.uids))]
        candidates = [
            Candidate(row.drafting, count)
            for row, count in zip(self._rows, most, strict=True)
            if count
        ]
        length = self._lengths.choose(len(most), candidates) if candidates else 0
        length = self._ranks.broadcast("draft length", length)  # each rank has times of its own
        responses = self._with_drafts([min(length, each) for each in most]) if length else None
        return self._without_drafts() if responses is None else responses

    def _draft_length(self, row: int, most: int | None) -> int:
        """The most tokens to draft for a row, 0 if the draft has nothing to say. Its cache can roll
        back `most`; None for any number."""
        each = self._rows[row]
        left: int = self.max_tokens[row] - self.parts.num_tokens[row] - 1
        count = min(left, each.options.num_draft_tokens, left if most is None else most)
        grammar = grammar_of((self.logits_processors or [])[row])
        # The first of these is the token that is sampled already.
        forced = 0 if grammar is None or count <= 0 else len(grammar.forced) - 1
        each.is_forced = forced > 0
        if each.is_forced:
            return min(count, forced)
        return count if count > 0 and self._draft.may_follow(each.state, self.tokens[row]) else 0

    def _without_drafts(self) -> list[GenerationBatch.Response]:
        counts = [row.counts for row in self._rows]
        began = perf_counter()
        responses: list[Any] = super().next()
        seconds = perf_counter() - began
        if self._plain_rows == len(counts):
            # It has waited for the step before it, which was begun as this one was.
            self._lengths.record(len(counts), 1, seconds)
        self._plain_rows = len(counts)
        for response, count in zip(responses, counts, strict=True):
            response.speculation = count
        return responses

    def _with_drafts(self, counts: list[int]) -> list[GenerationBatch.Response] | None:
        """A step that drafts so many tokens for each row. None, and nothing is changed, if there
        are no drafts, or no memory for them."""
        emitting: Any = if_short_again(self.parts.next_tokens.tolist)
        paged = first_paged(self.prompt_cache)
        sequences = [None] * len(counts) if paged is None else paged.sequences
        requests = {
            row: DraftRow(
                self._rows[row].state, self.tokens[row], emitting[row], count, sequences[row]
            )
            for row, count in enumerate(counts)
            if count and not self._rows[row].is_forced
        }
        began = perf_counter()
        if requests:
            self._draft.prepare(list(requests.values()))
        rollback, before = Rollback(self.model, self.prompt_cache), SampledState(self)
        verified = attempted(partial(self._verified, emitting, counts, requests))
        if isinstance(verified, Shortage):
            rollback.undo()
            before.put_back(self)
            make_room()
            return None
        if verified is None:
            return None
        responses = self._emit(verified, rollback)
        longest = max(map(len, verified[0]))
        self._lengths.record(len(counts), longest, perf_counter() - began)
        self._plain_rows = 0
        return responses

    def _verified(
        self, emitting: list[int], counts: list[int], requests: dict[int, DraftRow]
    ) -> _Verified | None:
        """What the model samples behind each row's token to emit and so many drafted ones. None,
        and nothing is changed, if there are no drafts, or no pages for them.

        Args:
            requests: of the rows for which the draft proposes tokens.
        """
        grammars = self.grammars()
        for row, grammar in grammars.items():
            grammar.take(emitting[row], self.parts.num_tokens[row])
        drafts = self._draft.propose(list(requests.values())) if requests else []
        drafts = self._ranks.broadcast("drafts", drafts)
        proposed = dict(zip(requests, drafts, strict=True))
        inputs = []
        for row, token in enumerate(emitting):
            drafted = proposed.get(row, [])
            if row in grammars and counts[row]:
                drafted = grammars[row].drafted(drafted, counts[row])
            inputs.append([token, *drafted[: counts[row]]])
        if max(map(len, inputs)) == 1:
            return None
        try:
            logits = ragged_step(self.model, self.prompt_cache, inputs)
        except PoolExhausted:
            # Memory for one token of each row is reserved already.
            return None
        if grammars:
            mx.async_eval(logits)  # type: ignore[no-untyped-call]  # mlx's stubs forget its types
            logits = within_grammars(logits, grammars, inputs)
        sampled = self._sample(logits, inputs)
        for row, grammar in grammars.items():
            accepted = sampled[row].tokens[:-1]
            for at, token in enumerate(accepted, self.parts.num_tokens[row] + 1):
                grammar.take(token, at)
        following = mx.array([each.tokens[-1] for each in sampled], dtype=mx.uint32)
        return inputs, sampled, following

    def _sample(self, logits: mx.array, inputs: list[list[int]]) -> list[_Sampled]:
        """Sample after each row's inputs, until a drafted token differs.

        A sampler of one row may count its calls, as one with a seed does, and processors may count
        tokens. So these rows are sampled token by token: sampler and processors see what they would
        see without drafts. The other rows are sampled in one call of each sampler.

        Args:
            logits: [rows, positions, vocabulary]; a row's positions after its inputs are padding.
            inputs: per row the token to emit now, followed by the drafted tokens.
        """
        samplers: list[Sampler] = self.samplers or []
        processors = [other_processors(each) for each in self.logits_processors or []]
        groups: dict[Sampler, list[int]] = {}
        for row, sampler in enumerate(samplers):
            if not processors[row]:
                groups.setdefault(sampler, []).append(row)
        found: dict[int, _Sampled] = {}
        for sampler, rows in groups.items():
            if len(rows) > 1 or sampler in (self.fallback_sampler, greedy_sampler):
                part = logits if len(rows) == len(inputs) else logits[mx.array(rows)]
                jointly = _sample_jointly(part, [inputs[row] for row in rows], sampler)
                found.update(zip(rows, jointly, strict=True))
        return [
            found[row]
            if row in found
            else self._sample_by_token(row, logits[row], inputs[row], processors[row])
            for row in range(len(inputs))
        ]

    def _sample_by_token(
        self, row: int, logits: mx.array, inputs: list[int], processors: list[Any]
    ) -> _Sampled:
        """Sample after the inputs of one row; its processors see mlx-lm's buffer of its tokens."""
        tokens: list[int] = []
        logprobs: list[mx.array] = []
        for at, token in enumerate(inputs):
            if at and token != tokens[-1]:
                break
            processed = logits[at : at + 1]
            if processors:
                buffer = self.parts.token_context[row]
                context = buffer.update_and_fetch(mx.array([token], dtype=mx.uint32))
                for processor in processors:
                    processed = processor(context, processed)
            normalised = _normalised(processed)
            chosen: Any = (self.samplers or [])[row](normalised).item()
            tokens.append(int(chosen))
            logprobs.append(normalised[0])
        return _Sampled(tokens, logprobs)

    def _emit(self, verified: _Verified, rollback: Rollback) -> list[GenerationBatch.Response]:
        """Emit the accepted tokens of each row, until it ends, and remove the others."""
        inputs, sampled, self.parts.next_tokens = verified
        logprobs = self.parts.next_logprobs
        self.parts.next_logprobs = [each.logprobs[-1] for each in sampled]
        ends = [self._end(row, inputs[row][: len(each.tokens)]) for row, each in enumerate(sampled)]
        rollback.keep(inputs, [count for count, _ in ends])
        responses = []
        for row, (count, finish_reason) in enumerate(ends):
            tokens = inputs[row][:count]
            self.tokens[row].extend(tokens)
            self._count(row, len(inputs[row]) - 1, count - 1)
            known = [logprobs[row], *sampled[row].logprobs]
            for token, each in zip(tokens[:-1], known, strict=False):
                responses.append(self._response(row, token, each, None))
            responses.append(self._response(row, tokens[-1], known[count - 1], finish_reason))
        if any(reason for _, reason in ends):
            self.filter([row for row, (_, reason) in enumerate(ends) if reason is None])
        return responses

    def _end(self, row: int, tokens: list[int]) -> tuple[int, str | None]:
        """How many of these tokens to emit, and why the row ends with the last of them."""
        for count, token in enumerate(tokens, 1):
            self.parts.num_tokens[row] += 1
            if self.parts.matchers[row].advance(token):
                return count, "stop"
            if self.parts.num_tokens[row] >= self.max_tokens[row]:
                return count, "length"
        return len(tokens), None

    def _count(self, row: int, drafted: int, accepted: int) -> None:
        each = self._rows[row]
        self.counts.record(drafted, accepted)
        each.counts.record(drafted, accepted)
        each.drafting.record(drafted, accepted)
        if (cache := first_paged(self.prompt_cache)) is not None:
            cache.pool.counts.record_draft(drafted, accepted)

    def _response(
        self, row: int, token: int, logprobs: mx.array, finish_reason: str | None
    ) -> GenerationBatch.Response:
        has_ended = finish_reason is not None
        return self.Response(
            uid=self.uids[row],
            token=token,
            logprobs=logprobs,
            finish_reason=finish_reason,
            prompt_cache=self.extract_cache(row) if has_ended else None,
            all_tokens=self.tokens[row] if has_ended else None,
            speculation=self._rows[row].counts,
        )


def _sample_jointly(logits: mx.array, inputs: list[list[int]], sampler: Sampler) -> list[_Sampled]:
    rows, positions, vocabulary = logits.shape
    logprobs = _normalised(logits)
    tokens = sampler(logprobs.reshape(-1, vocabulary)).reshape(rows, positions)
    mx.eval(tokens, logprobs)
    chosen: Any = tokens.tolist()
    return [_accepted(chosen[row], inputs[row], logprobs[row]) for row in range(rows)]


def _accepted(chosen: list[int], inputs: list[int], logprobs: mx.array) -> _Sampled:
    drafted = inputs[1:]
    count = 0
    while count < len(drafted) and chosen[count] == drafted[count]:
        count += 1
    return _Sampled(chosen[: count + 1], list(logprobs[: count + 1]))


def _normalised(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
