"""Samples the model's tokens behind each draft, and accepts the drafted tokens that equal them.

This is mlx-lm's rule: the emitted token of a position is always the sampler's, so it is a sample of
the model; a draft only decides how many positions one step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Sampled:
    """The tokens of the model after one row's inputs.

    Attributes:
        tokens: the accepted drafts, and the token after them.
        logprobs: the model's log-probabilities [vocabulary] for each of them.
    """

    tokens: list[int]
    logprobs: Sequence[mx.array]


@dataclass(frozen=True)
class Chooser:
    """How one row chooses tokens.

    Attributes:
        sampler: chooses tokens [N] from log-probabilities [N, vocabulary].
        processors: change the logits [1, vocabulary] of a token, given the tokens before it.
        context: mlx-lm's TokenBuffer of the row: the tokens that processors see.
    """

    sampler: Sampler
    processors: Sequence[Processor]
    context: Any


def sample(
    logits: mx.array, inputs: list[list[int]], choosers: list[Chooser], shared: Sampler
) -> list[Sampled]:
    """Sample after each row's inputs, until a drafted token differs.

    A sampler of one row may count its calls, as one with a seed does, and processors may count
    tokens. So these rows are sampled token by token: sampler and processors see what they would
    see without drafts. The other rows are sampled in one call of each sampler.

    Args:
        logits: [rows, positions, vocabulary]; a row's positions after its inputs are padding.
        inputs: per row the token to emit now, followed by the drafted tokens.
        choosers: one per row.
        shared: the sampler of rows that were given none.
    """
    sampled: dict[int, Sampled] = {}
    for sampler, rows in _joint_rows(choosers, shared).items():
        part = logits if len(rows) == len(inputs) else logits[mx.array(rows)]
        found = _sample_jointly(part, [inputs[row] for row in rows], sampler)
        sampled.update(zip(rows, found, strict=True))
    for row, chooser in enumerate(choosers):
        if row not in sampled:
            sampled[row] = _sample_by_token(logits[row], inputs[row], chooser)
    return [sampled[row] for row in range(len(inputs))]


def _joint_rows(choosers: list[Chooser], shared: Sampler) -> dict[Sampler, list[int]]:
    """The rows without processors whose sampler belongs to no row alone, by sampler."""
    groups: dict[Sampler, list[int]] = {}
    for row, chooser in enumerate(choosers):
        if not chooser.processors:
            groups.setdefault(chooser.sampler, []).append(row)
    return {
        sampler: rows
        for sampler, rows in groups.items()
        if len(rows) > 1 or sampler in (shared, greedy_sampler)
    }


def _sample_jointly(logits: mx.array, inputs: list[list[int]], sampler: Sampler) -> list[Sampled]:
    rows, positions, vocabulary = logits.shape
    logprobs = _normalised(logits)
    tokens = sampler(logprobs.reshape(-1, vocabulary)).reshape(rows, positions)
    mx.eval(tokens, logprobs)
    chosen: Any = tokens.tolist()
    return [_accepted(chosen[row], inputs[row], logprobs[row]) for row in range(rows)]


def _accepted(chosen: list[int], inputs: list[int], logprobs: mx.array) -> Sampled:
    drafted = inputs[1:]
    count = 0
    while count < len(drafted) and chosen[count] == drafted[count]:
        count += 1
    return Sampled(chosen[: count + 1], list(logprobs[: count + 1]))


def _sample_by_token(logits: mx.array, inputs: list[int], chooser: Chooser) -> Sampled:
    tokens: list[int] = []
    logprobs: list[mx.array] = []
    for at, token in enumerate(inputs):
        if at and token != tokens[-1]:
            break
        processed = logits[at : at + 1]
        if chooser.processors:
            context = chooser.context.update_and_fetch(mx.array([token], dtype=mx.uint32))
            for processor in chooser.processors:
                processed = processor(context, processed)
        normalised = _normalised(processed)
        chosen: Any = chooser.sampler(normalised).item()
        tokens.append(int(chosen))
        logprobs.append(normalised[0])
    return Sampled(tokens, logprobs)


def _normalised(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
