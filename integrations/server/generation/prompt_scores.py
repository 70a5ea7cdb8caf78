"""Computes the log probabilities of a prompt's own tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from paged_kv.integrations.server.generation.jobs import Job, ScoredToken, TopToken

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

    def note(self, logits: mx.array) -> None:
        """Score the next tokens.

        Args:
            logits: [1, N, vocabulary], behind the last scored token and the N - 1 after it.
        """
        scored, count = self._job.scored, self._job.prompt_logprobs or 0
        at = len(scored)
        tokens = self._tokens[at : at + logits.shape[1]]
        logprobs = logits[0].astype(mx.float32)
        logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
        own = mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1)
        ranks = mx.sum(logprobs > own, axis=-1) + 1
        best = mx.argpartition(-logprobs, kth=max(0, count - 1), axis=-1)[:, :count]
        values = mx.take_along_axis(logprobs, best, axis=-1)
        mx.eval(own, ranks, best, values)
        lists: tuple[Any, ...] = (
            own[:, 0].tolist(),
            ranks.tolist(),
            best.tolist(),
            values.tolist(),
        )
        for token, logprob, rank, ids, its in zip(tokens, *lists, strict=True):
            top = sorted(map(TopToken, ids, its), key=lambda each: -each.logprob)
            scored.append(ScoredToken(token, logprob, rank, tuple(top)))
