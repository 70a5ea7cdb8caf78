"""Counts the tokens that the recurrent states of a model without pages have taken in.

In other models the layers with pages know it. Here the model's call tells the first layer's cache
(`model_calls`), as many models write their states and say nothing about tokens.
"""

from __future__ import annotations

from collections import abc
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.checks import described
from paged_kv.integrations.batching.prompt_caches import leaves, paged_caches
from paged_kv.integrations.mlx_lm_internals import let_load
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.batch import integers
from paged_kv.steps.sequence import PromptStates, Sequence


class HeldTokens(NamedTuple):
    """What the caches of one sequence hold.

    Attributes:
        num_tokens: how many tokens; None if padding may be among them.
        model_version: the version of the model that computed all of them, or None if that is not
            known or not one.
        prompt_states: see `Sequence`.
    """

    num_tokens: int | None
    model_version: int | None
    prompt_states: PromptStates | None = None

    def after(self, num_tokens: int) -> HeldTokens:
        """The same after a step of so many tokens."""
        known = self.num_tokens
        return self._replace(num_tokens=None if known is None else known + num_tokens)

    def computed_by(self, version: int) -> HeldTokens:
        """The same before a step of this version."""
        if self.num_tokens == 0 or self.model_version == version:
            return self._replace(model_version=version)
        return self._replace(model_version=None)


class CountedArraysCache(ArraysCache):
    """mlx-lm's ArraysCache of the first layer, which also counts tokens.

    Attributes:
        held: what it holds of each sequence.
        pool: that of the factory, which has no pages; None if it is not known.
    """

    pool: PagePool | None = None

    def __init__(self, size: int, pool: PagePool | None = None) -> None:
        super().__init__(size)
        self.held = [HeldTokens(0, None)]
        self.pool = pool

    def record_version(self) -> None:
        """Record that the present version of the model computes the next tokens."""
        if self.pool is not None and self.pool.versions is not None:
            number = self.pool.versions.number
            self.held = [each.computed_by(number) for each in self.held]

    def note_step(self, batch_size: int, num_tokens: int) -> None:
        """Note that every sequence of a batch has taken in so many tokens. A new cache becomes a
        batch with its first step."""
        before = self.held if len(self.held) == batch_size else self.held * batch_size
        self.held = [each.after(num_tokens) for each in before]

    def keep_of_step(self, before: list[HeldTokens], counts: list[int]) -> None:
        """Note that only the first tokens of a step were kept, for each sequence so many."""
        steps = zip(self.held, before, counts, strict=True)
        self.held = [
            now if now.num_tokens is None else held.after(count) for now, held, count in steps
        ]

    @property
    def state(self) -> tuple[Any, ...]:
        counts = [each.num_tokens for each in self.held]
        return self.cache, self.left_padding, self.lengths, counts

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.cache, self.left_padding, self.lengths, counts = state
        self.held = [HeldTokens(each, None) for each in counts]

    def prepare(self, lengths: list[int] | None = None, **padding: Any) -> None:
        super().prepare(lengths=lengths, **padding)  # type: ignore[no-untyped-call]  # mlx-lm's
        if lengths is not None and len(set(lengths)) > 1:
            self.held = [each._replace(num_tokens=None) for each in self.held]

    def filter(self, batch_indices: abc.Sequence[int] | mx.array) -> None:
        super().filter(batch_indices)  # type: ignore[no-untyped-call]  # mlx-lm's
        self.held = [self.held[at] for at in integers(batch_indices)]

    def extend(self, other: CountedArraysCache) -> None:
        super().extend(other)  # type: ignore[no-untyped-call]  # mlx-lm's
        self.held = [*self.held, *other.held]

    def extract(self, idx: int) -> CountedArraysCache:
        one = CountedArraysCache(len(self.cache), self.pool)
        one.cache = super().extract(idx).cache  # type: ignore[no-untyped-call]  # mlx-lm's
        one.held = [self.held[idx]]
        return one

    @classmethod
    def merge(cls, caches: list[CountedArraysCache]) -> CountedArraysCache:
        batch: CountedArraysCache = super().merge(caches)  # type: ignore[no-untyped-call]  # mlx-lm's
        batch.held = [held for cache in caches for held in cache.held]
        batch.pool = caches[0].pool
        return batch


def are_ours(prompt_cache: list[Any]) -> bool:
    """Whether these are a factory's caches, so that a call which fails can be undone."""
    return any(isinstance(each, PagedKVCache | CountedArraysCache) for each in leaves(prompt_cache))


def known_states(layers: list[Any], pool: PagePool) -> list[Any]:
    """The prompt cache of a new sequence of a model without pages, in which the first cache knows
    how many tokens it holds. Caches of classes that this cannot tell stay as they are."""
    first = layers[0] if layers else None
    if type(first) is ArraysCache:
        return [CountedArraysCache(len(first.cache), pool), *layers[1:]]
    return layers


def continued(prompt_cache: list[Any], pool: PagePool, number: int) -> list[Any]:
    """A prompt cache that this version of the pool's model has computed."""
    first = next(leaves(prompt_cache), None)
    if isinstance(first, CountedArraysCache):
        first.pool = pool
        first.held = [each._replace(model_version=number) for each in first.held]
    return prompt_cache


def only_sequence(prompt_cache: list[Any], pool: PagePool, num_caches: int) -> Sequence:
    """The one sequence that all layers of a prompt cache hold.

    Raises:
        TypeError: `prompt_cache` is not a list.
        ValueError: it does not have `num_caches` caches, is of another pool, or holds several
            sequences.
    """
    if not isinstance(prompt_cache, list):
        raise TypeError(f"prompt_cache must be a list of caches, got {described(prompt_cache)}")
    caches = paged_caches(prompt_cache)
    if len(prompt_cache) != num_caches or len(caches) != pool.num_layers:
        raise ValueError(
            f"prompt_cache must be {num_caches} caches of this model, {pool.num_layers} of them "
            f"paged, got {len(prompt_cache)} and {len(caches)}: make_cache() makes such ones"
        )
    if any(cache.pool is not pool for cache in caches):
        raise ValueError(
            "prompt_cache holds pages of another factory, or was made with max_kv_size: insert "
            "what make_cache() or fetch_cache(tokens) of this factory returned"
        )
    sequences = {sequence for cache in caches for sequence in cache.sequences}
    if not pool.num_layers:
        first = next(leaves(prompt_cache), None)
        held = first.held if isinstance(first, CountedArraysCache) else [HeldTokens(None, None)]
        sequences = {_with_states(pool, each) for each in held}
    if len(sequences) != 1:
        raise ValueError(
            f"prompt_cache must hold one sequence, got one of {len(sequences)}: extract(i) of its "
            "caches gives one sequence of a batch"
        )
    return sequences.pop()


def _with_states(pool: PagePool, held: HeldTokens) -> Sequence:
    """A sequence without pages, with the tokens of its states; none if they are not known."""
    sequence = Sequence(pool)
    sequence.model_version, sequence.prompt_states = held.model_version, held.prompt_states
    sequence.begin_at(held.num_tokens or 0, {})
    return sequence


let_load(CountedArraysCache)
