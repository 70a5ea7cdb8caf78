"""Prompts that are inserted together and begin alike are computed once.

mlx-lm's batch generator computes each prompt of a batch as a row of its own. Before it is given
the prompts, what several of them share is computed for one of them; the others fork it, and each
goes on with the rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, zip_longest
from typing import Any, Protocol

import mlx.core as mx

from paged_kv.allocator.prefix_index import common_prefix
from paged_kv.kernels.page_format import PAGE_SIZE

Tokens = list[int]

# What two prompts share is worth a step of its own from a page on.
WORTH_SHARING = PAGE_SIZE


class Reuses(Protocol):
    """What knows prompts that were computed before."""

    def fetch_cache(self, tokens: Tokens, *, salt: Hashable = None) -> tuple[list[Any], int]: ...

    def insert_cache(
        self, tokens: Tokens, prompt_cache: list[Any], *, salt: Hashable = None
    ) -> int: ...


def begin_together(
    factory: Reuses, model: Any, prompts: Sequence[Tokens], step_size: int
) -> list[tuple[list[Any], int]]:
    """For each prompt a cache that holds what is known of it or shared with another of them, and
    how many tokens that is."""
    order = sorted(range(len(prompts)), key=lambda index: prompts[index])
    found: list[tuple[list[Any], int]] = [([], 0)] * len(prompts)
    for index, following in zip_longest(order, order[1:]):
        prompt = prompts[index]
        cache, cached = factory.fetch_cache(prompt)
        # In their order each prompt shares most with a neighbour.
        shared = 0 if following is None else common_prefix(prompt, prompts[following])
        goal = min(shared, len(prompt) - 1)
        if goal - cached >= WORTH_SHARING:
            _prefill(model, prompt[cached:goal], cache, step_size)
            factory.insert_cache(prompt[:goal], cache)
            cached = goal
        found[index] = cache, cached
    return found


def without_first(segments: Sequence[Tokens], count: int) -> list[Tokens]:
    """Segments of a prompt without its first tokens; none that is left is empty."""
    rest = []
    for segment in segments:
        rest.append(segment[count:])
        count = max(0, count - len(segment))
    return [segment for segment in rest if segment]


def joined(segments: Sequence[Tokens]) -> Tokens:
    """A prompt from its segments."""
    return list(chain.from_iterable(segments))


def _prefill(model: Any, tokens: Tokens, cache: list[Any], step_size: int) -> None:
    for start in range(0, len(tokens), step_size):
        model(mx.array([tokens[start : start + step_size]]), cache=cache)
        mx.eval([layer.state for layer in cache])
