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

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.kernels.pages.page_format import PAGE_SIZE

Tokens = list[int]

# What two prompts share is worth a step of its own from a page on.
WORTH_SHARING = PAGE_SIZE

# Recurrent layers go on only where their state was kept: besides where prompts end, after so many
# tokens each. mlx-lm computes as many in a step, so none gets shorter for it, and states, which can
# be as large as the pages of a thousand tokens or more, stay fewer than pages.
SNAPSHOT_TOKENS = 8 * PAGE_SIZE


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
            for end in step_ends(cached, goal, step_size):
                _step(model, prompt[cached:end], cache)
                if end == goal or not end % SNAPSHOT_TOKENS:
                    factory.insert_cache(prompt[:end], cache)
                cached = end
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


def step_ends(start: int, end: int, step_size: int) -> list[int]:
    """Where the steps end that compute the tokens [start, end) of a prompt: wherever recurrent
    layers are to be remembered, and before they are too long."""
    ends = []
    while start < end:
        border = (start // SNAPSHOT_TOKENS + 1) * SNAPSHOT_TOKENS
        start = min(start + step_size, border, end)
        ends.append(start)
    return ends


def cut_for_snapshots(segments: Sequence[Tokens]) -> list[Tokens]:
    """Segments of a prompt, cut also where recurrent layers are to be remembered."""
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
