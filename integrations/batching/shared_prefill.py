"""Computes the common prefix of prompts that are inserted together once.

mlx-lm's batch generator computes each prompt of a batch separately. Before it gets the prompts,
this computes their shared prefix for one of them; the others fork it and compute only the rest.
If memory is too short for that, it is done when the first of them begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, zip_longest
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from paged_kv.allocator.errors import OutOfMemory
from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.integrations.batching.cache_rows import compute
from paged_kv.integrations.batching.short_memory import FittingSteps
from paged_kv.kernels.pages.page_format import PAGE_SIZE

Tokens = list[int]

# A shared prefix of at least a page is worth a step of its own.
WORTH_SHARING = PAGE_SIZE

# Recurrent layers resume only where a snapshot was taken: where prompts end, or where their last
# page begins if it may be quantised or there is a store, where prompts are known to part, and on
# the way after SNAPSHOT_TOKENS, twice, four times as many tokens and so on: a prompt that parts
# where nobody has parted before resumes at least half-way. A state can be as large as the pages of
# a thousand tokens or more. That is mlx-lm's prefill step, so no step gets shorter.
SNAPSHOT_TOKENS = 8 * PAGE_SIZE


class Reuses(Protocol):
    """Finds and keeps cached prompts."""

    def fetch_cache(self, tokens: Tokens, *, salt: Hashable = None) -> tuple[list[Any], int]: ...

    def parting(self, tokens: Tokens, *, salt: Hashable = None) -> int: ...

    def insert_cache(
        self,
        tokens: Tokens,
        prompt_cache: list[Any],
        *,
        salt: Hashable = None,
        session: Hashable = None,
    ) -> int: ...


class Start(NamedTuple):
    """What a prompt starts with.

    Attributes:
        cache: a prompt cache that holds its first tokens.
        cached: how many.
        is_complete: whether these are all that it shares with another prompt, as far as that is
            worth sharing. Otherwise memory was too short to compute more.
    """

    cache: list[Any]
    cached: int
    is_complete: bool


@dataclass(frozen=True)
class SharedPrefill:
    """Computes prefixes that several prompts share.

    Attributes:
        factory: makes, finds and keeps the prompt caches.
        model: computes them.
        step_size: the most tokens to compute at once.
        reserve: reserves memory for so many next tokens of a prompt cache; false if there is none.
    """

    factory: Reuses
    model: Any
    step_size: int
    reserve: Callable[[list[Any], int], bool]

    def starts(self, prompts: Sequence[Tokens]) -> list[Start]:
        """For each prompt its longest prefix that is cached or shared with another of them."""
        order = sorted(range(len(prompts)), key=lambda index: prompts[index])
        found: dict[int, Start] = {}
        for index, following in zip_longest(order, order[1:]):
            # In sorted order each prompt shares its longest prefix with a neighbour.
            others = [] if following is None else [prompts[following]]
            found[index] = self.start(prompts[index], others)
        return [found[index] for index in range(len(prompts))]

    def start(self, prompt: Tokens, others: Iterable[Tokens], *, salt: Hashable = None) -> Start:
        """The longest prefix of a prompt that is cached or shared with one of the others, or with
        prompts of which the states there are not cached."""
        cache, cached = self.factory.fetch_cache(prompt, salt=salt)
        shared = max([common_prefix(prompt, other) for other in others], default=0)
        shared = max(shared, self.factory.parting(prompt))
        goal = min(shared, len(prompt) - 1)
        if goal - cached >= WORTH_SHARING:
            cached = self._compute(prompt[:goal], cache, cached)
        return Start(cache, cached, goal - cached < WORTH_SHARING)

    def _compute(self, tokens: Tokens, cache: list[Any], cached: int) -> int:
        """Compute and cache tokens of which a prompt cache holds the first ones, as far as memory
        goes; returns how many it holds then."""
        begin, steps = cached, FittingSteps(self.step_size)
        for end in step_ends(cached, len(tokens), self.step_size):
            if not self.reserve(cache, end - cached):
                break
            try:
                while cached < end:
                    step = partial(self._step, tokens[cached:end], cache)
                    cached += steps.take(step, end - cached)
            except OutOfMemory:
                break
            if is_on_the_way(end):
                self.factory.insert_cache(tokens[:end], cache)
        if cached > begin and not is_on_the_way(cached):
            self.factory.insert_cache(tokens[:cached], cache)
        return cached

    def _step(self, tokens: Tokens, cache: list[Any], count: int) -> None:
        """Compute the first `count` of these next tokens of a prompt cache."""
        self.model(mx.array([tokens[:count]]), cache=cache)
        compute(cache)


def shared_beyond(cached: int, prompt: Tokens, other: Tokens) -> int:
    """How many tokens behind the first `cached` ones two prompts share; 0 if these are not worth
    sharing."""
    least = cached + WORTH_SHARING
    if prompt[:least] != other[:least]:  # quicker than what follows
        return 0
    missing = common_prefix(prompt, other) - cached
    return missing if missing >= WORTH_SHARING else 0


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


def is_on_the_way(end: int) -> bool:
    """Whether a snapshot of recurrent layers is due after so many tokens of any prompt."""
    steps, rest = divmod(end, SNAPSHOT_TOKENS)
    return not rest and steps.bit_count() == 1


def step_ends(start: int, end: int, step_size: int) -> list[int]:
    """The ends of the steps that compute the tokens [start, end) of a prompt. A step ends wherever
    a snapshot is due, and has at most `step_size` tokens."""
    ends = []
    while start < end:
        border = SNAPSHOT_TOKENS << (start // SNAPSHOT_TOKENS).bit_length()
        start = min(start + step_size, border, end)
        ends.append(start)
    return ends


def cut_at(segments: Iterable[Tokens], ends: Iterable[int]) -> list[Tokens]:
    """Segments of a prompt, also cut after these numbers of tokens."""
    cut: list[Tokens] = []
    start = 0
    for segment in segments:
        end = start + len(segment)
        borders = [start, *sorted(each for each in ends if start < each < end), end]
        cut += [segment[first - start : last - start] for first, last in pairwise(borders)]
        start = end
    return cut


def cut_for_snapshots(segments: Sequence[Tokens], *, at_pages: bool = False) -> list[Tokens]:
    """Segments of a prompt, also cut wherever a snapshot of recurrent layers is due.

    With `at_pages`, each is also cut where its last page begins: no prompt can resume from a
    snapshot within a page that is quantised, and stores hold full pages only.
    """
    cut: list[Tokens] = []
    start = 0
    for segment in segments:
        first, end = start, start + len(segment)
        last_page = (end - 1) // PAGE_SIZE * PAGE_SIZE
        at = {last_page} if at_pages and last_page > start else set()
        for border in sorted({*step_ends(start, end, end), *at}):
            cut.append(segment[first - start : border - start])
            first = border
        start = end
    return cut
