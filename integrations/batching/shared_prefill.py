"""Computes the common prefix of prompts that are inserted together once.

mlx-lm's batch generator computes each prompt of a batch separately. Before it gets the prompts,
this computes their shared prefix for one of them; the others fork it and compute only the rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, zip_longest
from typing import Any, Protocol

import mlx.core as mx

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.kernels.pages.page_format import PAGE_SIZE

Tokens = list[int]

# A shared prefix of at least a page is worth a step of its own.
WORTH_SHARING = PAGE_SIZE

# Recurrent layers resume only where a snapshot was taken: where prompts end, and after each
# SNAPSHOT_TOKENS tokens. That is mlx-lm's prefill step, so no step gets shorter. A state can be as
# large as the pages of a thousand tokens or more, so snapshots must be fewer than pages.
SNAPSHOT_TOKENS = 8 * PAGE_SIZE


class Reuses(Protocol):
    """Finds and keeps cached prompts."""

    def fetch_cache(self, tokens: Tokens, *, salt: Hashable = None) -> tuple[list[Any], int]: ...

    def insert_cache(
        self, tokens: Tokens, prompt_cache: list[Any], *, salt: Hashable = None
    ) -> int: ...


def begin_together(
    factory: Reuses, model: Any, prompts: Sequence[Tokens], step_size: int
) -> list[tuple[list[Any], int]]:
    """For each prompt a cache with its longest prefix that is cached or shared with another of the
    prompts, and the prefix's length in tokens."""
    order = sorted(range(len(prompts)), key=lambda index: prompts[index])
    found: list[tuple[list[Any], int]] = [([], 0)] * len(prompts)
    for index, following in zip_longest(order, order[1:]):
        prompt = prompts[index]
        cache, cached = factory.fetch_cache(prompt)
        # In sorted order each prompt shares its longest prefix with a neighbour.
        shared = 0 if following is None else common_prefix(prompt, prompts[following])
        goal = min(shared, len(prompt) - 1)
        if goal - cached >= WORTH_SHARING:
            for end in step_ends(cached, goal, step_size):
                _step(model, prompt[cached:end], cache)
                if end == goal or not end % SNAPSHOT_TOKENS:
                    factory.insert_cache(prompt[:end], cache)
                cached = end
        found[index] = cache, cached
    return found


def without_first(segments: Sequence[Tokens], count: int) -> list[Tokens]:
    """Segments of a prompt without its first `count` tokens; empty segments are left out."""
    rest = []
    for segment in segments:
        rest.append(segment[count:])
        count = max(0, count - len(segment))
    return [segment for segment in rest if segment]


def joined(segments: Sequence[Tokens]) -> Tokens:
    """A prompt from its segments."""
    return list(chain.from_iterable(segments))


def step_ends(start: int, end: int, step_size: int) -> list[int]:
    """The ends of the steps that compute the tokens [start, end) of a prompt. A step ends wherever
    a snapshot is due, and has at most `step_size` tokens."""
    ends = []
    while start < end:
        border = (start // SNAPSHOT_TOKENS + 1) * SNAPSHOT_TOKENS
        start = min(start + step_size, border, end)
        ends.append(start)
    return ends


def cut_for_snapshots(segments: Sequence[Tokens]) -> list[Tokens]:
    """Segments of a prompt, also cut wherever a snapshot of recurrent layers is due."""
    cut: list[Tokens] = []
    start = 0
    for segment in segments:
        first = start
        for end in step_ends(start, start + len(segment), SNAPSHOT_TOKENS):
            cut.append(segment[first - start : end - start])
            first = end
        start += len(segment)
    return cut


def _step(model: Any, tokens: Tokens, cache: list[Any]) -> None:
    model(mx.array([tokens]), cache=cache)
    mx.eval([layer.state for layer in cache])
