"""Compares prompts, and cuts them where other prompts may resume."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

from paged_kv.allocator.prefixes.prefix_index import common_prefix
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


def whole_pages(tokens: int) -> int:
    """The tokens of so many pages as hold these."""
    return -(-tokens // PAGE_SIZE) * PAGE_SIZE


def cut_at_pages(segments: Iterable[Tokens], start: int, answered: int) -> list[Tokens]:
    """Segments behind the first `start` tokens of a reproducible sequence, cut at no other places
    than borders of pages.

    Each of the last `answered` tokens, and the one before them, is a segment of its own: they were
    or will be computed so, and not as a part of the prompt.
    """
    tokens: Tokens = []
    ends = set()
    for segment in segments:
        tokens += segment
        ends.add((start + len(tokens)) // PAGE_SIZE * PAGE_SIZE - start)
    prompt = max(0, len(tokens) - answered - 1)
    return cut_at([tokens], {*(min(end, prompt) for end in ends), *range(prompt, len(tokens))})


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
