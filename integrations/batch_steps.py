"""Computes the steps of mlx-lm's batches whose caches are a factory's.

Prompts of models with recurrent layers are not padded. mlx-lm's PromptProcessingBatch pads shorter
prompts on the right, and some of its models let that padding enter their recurrent states, so a
sequence's tokens depend on what it is batched with. Here a step is as long as the shortest prompt
that is left, and its sequence then leaves. Prompts of reproducible caches are computed one after
the other.

A step that MLX has no memory for is repeated in smaller parts (see `short_memory`). A sequence
without memory for a single token leaves its BatchGenerator with an error, and the others go on.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import ArraysCache

from paged_kv.allocator.errors import OutOfMemory
from paged_kv.integrations.batching.prompt_caches import compute as compute_caches
from paged_kv.integrations.batching.prompt_caches import joined, leaves, paged_caches
from paged_kv.integrations.batching.short_memory import (
    FittingSteps,
    Shortage,
    attempted,
    if_short_again,
    make_room,
    sequences_apart,
    taken_out,
    this_thread,
)
from paged_kv.integrations.mlx_lm_internals import STOCK_STEP, BatchParts
from paged_kv.integrations.model_hooks import Replacements
from paged_kv.integrations.states.counted_states import are_ours
from paged_kv.kernels.pages.page_format import PAGE_SIZE

_stock_prompt = PromptProcessingBatch.prompt


def prompt(batch: PromptProcessingBatch, tokens: list[list[int]]) -> None:
    """PromptProcessingBatch's method of this name. Batches with mlx-lm's own caches are computed as
    there."""
    if _is_reproducible(batch.prompt_cache):
        _compute_apart(batch, tokens)
        return
    ends = sorted({len(each) for each in tokens})
    if (
        len(ends) < 2
        or not any(isinstance(each, ArraysCache) for each in leaves(batch.prompt_cache))
        or not are_ours(batch.prompt_cache)
    ):
        _compute(batch, tokens)
        return
    rows, caches, begin = list(range(len(tokens))), batch.prompt_cache, 0
    left: list[int] = []
    left_caches: list[Any] = []
    for end in ends:
        part = part_of(batch, caches, rows)
        _compute(part, [tokens[row][begin:end] for row in rows])
        caches = part.prompt_cache
        leaving = [at for at, row in enumerate(rows) if len(tokens[row]) == end]
        staying = [at for at, row in enumerate(rows) if len(tokens[row]) > end]
        left_caches = joined(left_caches, taken_out(caches, leaving))
        caches = taken_out(caches, staying)
        left += [rows[at] for at in leaving]
        rows, begin = [rows[at] for at in staying], end
    batch.prompt_cache = taken_out(left_caches, [left.index(row) for row in range(len(tokens))])


def _compute_apart(batch: PromptProcessingBatch, tokens: list[list[int]]) -> None:
    """Compute the next tokens of prompts one after the other; but those that get a single token,
    as tokens of an answer that are computed again do, together."""
    single = [row for row, each in enumerate(tokens) if len(each) == 1]
    groups = [[row] for row, each in enumerate(tokens) if len(each) > 1]
    order: list[int] = []
    kept: list[Any] = []
    for rows in [*groups, single] if single else groups:
        part = part_of(batch, taken_out(batch.prompt_cache, rows), rows)
        _compute(part, [tokens[row] for row in rows])
        kept = joined(kept, part.prompt_cache)
        order += rows
    batch.prompt_cache = taken_out(kept, [order.index(row) for row in range(len(tokens))])


def part_of(batch: PromptProcessingBatch, caches: list[Any], rows: list[int]) -> Any:
    """Some rows of a batch, with these caches."""
    part = copy.copy(batch)
    part.uids, part.prompt_cache = [batch.uids[row] for row in rows], caches
    part.tokens = [batch.tokens[row] for row in rows]
    return part


def _compute(batch: Any, tokens: list[list[int]]) -> None:
    """Compute the next tokens of prompts as mlx-lm does, in steps that MLX has memory for."""
    shortages = this_thread.shortages
    if shortages is None or not are_ours(batch.prompt_cache):
        _stock_prompt(batch, tokens)
        return
    for held, new in zip(batch.tokens, tokens, strict=True):
        held += new
    lengths = [len(each) for each in tokens]
    done, longest = 0, max(lengths)
    padding = [longest - length for length in lengths]
    inputs = [each + [0] * more for each, more in zip(tokens, padding, strict=True)]
    if any(padding):
        for cache in batch.prompt_cache:
            cache.prepare(lengths=lengths, right_padding=padding)

    def compute(count: int) -> None:
        step = mx.array([each[done : done + count] for each in inputs])
        batch.model(step, cache=batch.prompt_cache)
        compute_caches(batch.prompt_cache)
        mx.clear_cache()

    why = None
    size = min(batch.prefill_step_size, shortages.longest or longest)
    least = 1
    if _is_reproducible(batch.prompt_cache):
        size = least = PAGE_SIZE
    steps = FittingSteps(size, least)
    try:
        while done < longest:
            done += steps.take(compute, longest - done)
    except OutOfMemory as error:
        why = error.why
    if steps.size < size:
        shortages.note_step(steps.size)
    # Rings write a long step only now that it is not undone any more.
    if_short_again(lambda: mx.eval([cache.state for cache in batch.prompt_cache]))
    if any(padding):
        for cache in batch.prompt_cache:
            cache.finalize()
    if why is None:
        return
    if len(tokens) == 1:
        shortages.note(batch.uids[0], why)
        return
    kept: list[Any] = []
    for row, each in enumerate(tokens):
        part = part_of(batch, taken_out(batch.prompt_cache, [row]), [row])
        part.tokens = [[]]  # These tokens are noted already.
        if each[done:]:
            _compute(part, [each[done:]])
        kept = joined(kept, part.prompt_cache)
    batch.prompt_cache = kept


def step(batch: GenerationBatch) -> tuple[list[int], list[mx.array]]:
    """GenerationBatch's method `_step`. Batches with mlx-lm's own caches take its own."""
    shortages = this_thread.shortages
    if shortages is None or not are_ours(batch.prompt_cache):
        return STOCK_STEP(batch)
    before = SampledState(batch)
    taken = attempted(partial(STOCK_STEP, batch))
    if not isinstance(taken, Shortage):
        return taken
    before.put_back(batch)
    make_room()
    with sequences_apart() as failed:
        taken = attempted(partial(STOCK_STEP, batch))
    if isinstance(taken, Shortage):
        # Not even for what follows the model's call.
        before.put_back(batch)
        failed = dict.fromkeys(range(len(batch.uids)), taken.why)
        taken = _last_tokens(batch)
    for row, why in failed.items():
        shortages.note(batch.uids[row], why)
    return taken


class SampledState:
    """What a step of a GenerationBatch changes before it is computed, as it was: sampled tokens,
    samplers that count their calls, and what logits processors see."""

    def __init__(self, batch: Any) -> None:
        parts = BatchParts(batch)
        self._sampled = parts.sampled
        objects = {id(each): each for each in batch.samplers or [] if hasattr(each, "__dict__")}
        if any(batch.logits_processors or []):
            objects |= {id(each): each for each in parts.token_context}
        self._others = [(each, vars(each).copy()) for each in objects.values()]

    def put_back(self, batch: Any) -> None:
        """Let the batch be as it was."""
        BatchParts(batch).sampled = self._sampled
        for each, attributes in self._others:
            vars(each).update(attributes)


def _last_tokens(batch: Any) -> tuple[list[int], list[mx.array]]:
    """The tokens that a batch has sampled, and their log-probabilities, where no row can go on."""
    parts = BatchParts(batch)
    inputs, logprobs = parts.next_tokens, parts.next_logprobs
    nothing = [mx.zeros(1) for _ in batch.uids]
    parts.sampled = (inputs, logprobs, mx.zeros_like(inputs), nothing)
    tokens: Any = inputs.tolist()
    for held, token in zip(batch.tokens, tokens, strict=True):
        held.append(token)
    return tokens, logprobs


def _is_reproducible(prompt_cache: list[Any]) -> bool:
    return any(each.pool.is_reproducible for each in paged_caches(prompt_cache)[:1])


BATCH_STEPS = Replacements({_stock_prompt: prompt, STOCK_STEP: step})
"""For `PromptProcessingBatch` and `GenerationBatch`."""
