"""A replay finds what a prefix index with the same policy would find, and no policy finds more than
one that knows the future."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.allocator.prefixes.eviction import (
    LEAST_WORTH,
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
)
from paged_kv.allocator.prefixes.uses import Use
from paged_kv.trace.replay import read_trace
from paged_kv.trace.request_lines import RequestLines, TracedMemory
from paged_kv.trace.requests import TracedLoad
from paged_kv.trace.reuse_replay import (
    Cache,
    ForeseenPages,
    IndexedPages,
    Reuse,
    most_reuse,
    replay_reuse,
)
from tests.support.examples import examples
from tests.support.page_paths import paths, texts_of_prompts

PAGE_BYTES = 256


@dataclass(frozen=True)
class Scrambled:
    """A policy without reason."""

    seed: int

    def rank(self, use: Use) -> float:
        return hash((self.seed, use.first, use.last)) % 97


POLICIES: list[EvictionPolicy] = [
    *(LEAST_WORTH, LeastRecentlyUsed(), LeastFrequentlyUsed(), FirstInFirstOut()),
    *(Scrambled(1), Scrambled(2)),
]


def found(cache: Cache, prompts: list[list[int]]) -> list[int]:
    return [cache.serve(prompt) for prompt in prompts]


class NaivePages:
    """Evicts the page that was used least recently, of one prompt the last one, by looking at all
    of them."""

    def __init__(self, capacity: int) -> None:
        self.evicted = 0
        self.capacity = capacity
        self.used: dict[int, tuple[int, int]] = {}
        self.now = 0

    def serve(self, prompt: Sequence[int]) -> int:
        self.now += 1
        hits = [page in self.used for page in prompt]
        for depth, page in enumerate(prompt[: self.capacity]):
            self.used[page] = self.now, -depth
        while len(self.used) > self.capacity:
            self.evicted += 1
            del self.used[min(self.used, key=lambda page: self.used[page])]
        return hits.index(False) if False in hits else len(hits)


@examples(200)
@given(texts=texts_of_prompts, capacity=st.integers(1, 12))
def test_least_recently_used_agrees_with_a_naive_model(
    texts: list[list[int]], capacity: int
) -> None:
    prompts = paths(texts)
    indexed, naive = IndexedPages(capacity, LeastRecentlyUsed()), NaivePages(capacity)
    assert found(indexed, prompts) == found(naive, prompts)
    assert indexed.evicted == naive.evicted


@examples(200)
@given(texts=texts_of_prompts, capacity=st.integers(1, 12))
def test_no_policy_finds_more_than_one_that_knows_the_future(
    texts: list[list[int]], capacity: int
) -> None:
    prompts = paths(texts)
    most = sum(found(ForeseenPages(capacity, prompts), prompts))
    for policy in POLICIES:
        assert sum(found(IndexedPages(capacity, policy), prompts)) <= most


def most_of_all_choices(prompts: list[list[int]], capacity: int) -> int:
    """Of every choice of pages to keep beside those of the last prompt, the most that is found."""
    cached = {frozenset[int](): 0}
    for prompt in prompts:
        after: dict[frozenset[int], int] = {}
        for pages, total in cached.items():
            hits = [page in pages for page in prompt]
            total += hits.index(False) if False in hits else len(hits)
            for kept in smaller(pages | {*prompt[:capacity]}, {*prompt[:capacity]}, capacity):
                after[kept] = max(after.get(kept, 0), total)
        cached = after
    return max(cached.values())


def smaller(pages: frozenset[int], needed: set[int], size: int) -> set[frozenset[int]]:
    """All sets of at most so many pages with those that are needed."""
    if len(pages) <= size:
        return {pages}
    return {each for page in pages - needed for each in smaller(pages - {page}, needed, size)}


@examples(60)
@given(
    texts=st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=1, max_size=7),
    capacity=st.integers(1, 5),
)
def test_the_most_is_that_of_all_choices(texts: list[list[int]], capacity: int) -> None:
    prompts = paths(texts)
    most = sum(found(ForeseenPages(capacity, prompts), prompts))
    assert most == most_of_all_choices(prompts, capacity)


def load(
    path: Path, *requests: tuple[int, int, int], max_bytes: int = 100 * PAGE_BYTES
) -> TracedLoad:
    """Requests with prompts of so many tokens, like an earlier one for so many pages; a token takes
    a byte."""
    file = RequestLines(path, TracedMemory(1, max_bytes), "pool")
    for now, (prompt, like, shared) in enumerate(requests):
        file.arrive(now, prompt, 10, like, shared)
    file.finish()
    return TracedLoad(read_trace(path), 256)


def test_tokens_are_counted_of_full_pages_that_prompts_share(tmp_path: Path) -> None:
    found_in = load(tmp_path / "trace", (1000, 0, 0), (1100, 0, 2), (1025, 1, 4), (300, 2, 1))
    reuse = replay_reuse(found_in, LeastRecentlyUsed())
    assert reuse == Reuse(100, 3425, (2 + 4 + 1) * 256, 0)
    assert reuse.share == pytest.approx(7 * 256 / 3425)
    assert most_reuse(found_in) == reuse


def test_a_budget_holds_so_many_pages(tmp_path: Path) -> None:
    """Two prompts of two pages take turns, and three pages fit."""
    turns = [(513, 0, 0), (513, 0, 0), (513, 0, 2), (513, 1, 2)]
    found_in = load(tmp_path / "trace", *turns)
    budget = 4 * PAGE_BYTES - 1
    # The last page of one prompt goes for each page that the other one lacks.
    assert replay_reuse(found_in, LeastRecentlyUsed(), budget) == Reuse(3, 2052, 2 * 256, 3)
    assert replay_reuse(found_in, LeastRecentlyUsed(), PAGE_BYTES) == Reuse(1, 2052, 0, 3)
    assert most_reuse(found_in, budget).tokens_found == 2 * 256


def test_pools_have_budgets_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    header = '{"paged_kv_trace": 1, "page_size": 256, "time": 0}'
    pools = [f"P {n} {n} 512 a\nB {n} 256 fp16\nG {n} {n} 0 0 0 0" for n in range(2)]
    lines = ["q 0 0 513 9", "q 1 1 513 9", "q 2 0 513 9", "h 2 0 2", "q 3 1 513 9", "h 3 1 2"]
    path.write_text("\n".join([header, *pools, *lines]) + "\n")
    served = TracedLoad(read_trace(path), 256)
    assert replay_reuse(served, LEAST_WORTH) == most_reuse(served) == Reuse(4, 2052, 4 * 256, 0)
