"""Reads and cuts the batches of mlx-lm's BatchGenerator, whose parts have no names of their own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch

from paged_kv.admission.growth import Growth
from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.shared_prefill import Tokens
from paged_kv.integrations.batching.unpaged_caches import paged_caches


class Waiting(NamedTuple):
    """A sequence that waits, as BatchGenerator keeps it.

    Attributes:
        uid: its number.
        segments: the tokens to compute; the last segment is the last token alone.
        max_tokens: the most tokens to generate.
        cache: its prompt cache.
        tokens: the tokens that the cache holds.
    """

    uid: int
    segments: list[Tokens]
    max_tokens: int
    cache: list[Any]
    tokens: Tokens
    sampler: Any
    processors: Any
    stops: Any

    @property
    def all_tokens(self) -> Tokens:
        """Held and to compute."""
        return [*self.tokens, *chain.from_iterable(self.segments)]

    @property
    def growth(self) -> Growth:
        """Its tokens."""
        prompt = len(self.tokens) + sum(map(len, self.segments))
        (held,) = held_tokens(self.cache) or [len(self.tokens)]
        return Growth(held, prompt, prompt + self.max_tokens)

    @property
    def is_at_last_token(self) -> bool:
        """Whether only the last token is left to compute."""
        return is_at_last_token(self.segments)


def is_at_last_token(segments: list[Tokens]) -> bool:
    """Whether only the last token is left to compute."""
    return len(segments) == 1 and len(segments[0]) == 1


def first_paged(prompt_cache: list[Any]) -> PagedKVCache | None:
    """The first paged cache; its sequences are those of all layers."""
    return next(iter(paged_caches(prompt_cache)), None)


def chunk_length(segments: list[Tokens], step_size: int) -> int:
    """The number of tokens that BatchGenerator computes next for a prompt."""
    return min(len(segments[0]), step_size)


def held_tokens(prompt_cache: list[Any]) -> list[int]:
    """The tokens of each sequence that blocks are reserved for, written or not."""
    cache = first_paged(prompt_cache)
    if cache is None:
        return []
    groups = [group for group in cache.pool.groups if group.is_open]
    return [
        max([each.table(group).tokens for group in groups], default=0) for each in cache.sequences
    ]


def growths(generator: BatchGenerator) -> Iterator[Growth]:
    """The tokens of the running sequences."""
    batch = generator._generation_batch
    rows = zip(batch.tokens, batch.max_tokens, batch._num_tokens, strict=True)
    for held, (tokens, most, count) in zip(held_tokens(batch.prompt_cache), rows, strict=False):
        yield Growth(held, len(tokens), len(tokens) + most - count)
    prompts = generator._prompt_batch
    rest = zip(prompts.tokens, prompts.max_tokens, generator._currently_processing, strict=True)
    for held, (tokens, most, (segments, *_)) in zip(
        held_tokens(prompts.prompt_cache), rest, strict=False
    ):
        prompt = len(tokens) + sum(map(len, segments))
        yield Growth(held, prompt, prompt + most)


def generating_row(batch: Any, at: int) -> GenerationBatch:
    """Row `at` of a batch as a batch of its own, without its cache and its tokens: all that its
    next tokens depend on besides, such as the token that is sampled already."""
    row: GenerationBatch = GenerationBatch.empty(batch.model, batch.fallback_sampler)
    row.uids = [batch.uids[at]]
    row.samplers = [batch.samplers[at]]
    row.logits_processors = [batch.logits_processors[at]]
    row.max_tokens = [batch.max_tokens[at]]
    row.stop_sequences = [batch.stop_sequences[at]]
    row._next_tokens = mx.array([int(batch._next_tokens[at])], dtype=mx.uint32)
    row._next_logprobs = [batch._next_logprobs[at]]
    row._token_context = [batch._token_context[at]]
    row._num_tokens = [batch._num_tokens[at]]
    row._matchers = [batch._matchers[at]]
    return row


def merged_cache(model: Any, uid: int, cache: list[Any]) -> list[Any]:
    """A prompt cache of one sequence, as the cache of a batch of one."""
    batch: list[Any] = PromptProcessingBatch(model, [uid], [cache]).prompt_cache
    return batch
