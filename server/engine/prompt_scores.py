"""Scores tokens of prompts where a batch computes them: what a prompt's steps compute anyway says
how likely each of its tokens was."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch

from paged_kv.integrations.batch_steps import part_of
from paged_kv.integrations.batching.prompt_caches import compute, joined
from paged_kv.integrations.batching.short_memory import taken_out
from paged_kv.server.engine.jobs import Job, ScoredToken, TopToken

# Numbers of the logits of a step, which are kept in float32 for a moment: 256 MiB. That is 441
# tokens with a vocabulary of 152,000, where the default step has 2,048.
MOST_LOGITS = 1 << 26


class PromptScores:
    """Scores the tokens of a job's prompt, part by part, into `job.scored`. Of each part the scores
    and the likeliest tokens are kept, and not the logits.

    Args:
        job: asks for them.
        tokens: of the prompt.
        vocab_size: of the model.
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
        """Score the next tokens.

        Args:
            logits: [1, N, vocabulary], behind the last scored token and the N - 1 after it.
        """
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
        lists: tuple[Any, ...] = (
            own[:, 0].tolist(),
            ranks.tolist(),
            best.tolist(),
            values.tolist(),
        )
        for token, logprob, rank, ids, logprobs_of_ids in zip(tokens, *lists, strict=True):
            top = sorted(map(TopToken, ids, logprobs_of_ids), key=lambda each: -each.logprob)
            scored.append(ScoredToken(token, logprob, rank, tuple(top)))


class ScoredPrompts(PromptProcessingBatch):
    """mlx-lm's batch of the prompts that are being computed, of which some are scored. Those take
    steps of their own, with few enough tokens for their logits: a model computes no logits of a
    prompt that nobody asks for, and in a common step it would compute them of all.

    Args:
        stock: the batch whose place this takes.
        scores: what scores a prompt, by uid; others are not scored.
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
        caches: list[Any] = part.prompt_cache
        return caches
