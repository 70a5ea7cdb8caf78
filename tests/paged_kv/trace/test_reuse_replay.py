"""A replay finds what a prefix index with the same policy would find, and no policy finds more than
one that knows the future."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from paged_kv.command_line import main
from paged_kv.trace.replay import read_trace
from paged_kv.trace.request_lines import RequestLines, TracedMemory
from paged_kv.trace.requests import TracedLoad
from paged_kv.trace.reuse_replay import (
    Cache,
    ForeseenPages,
    IndexedPages,
    most_reuse,
    replay_reuse,
)
from paged_kv.trace.state_replay import foreseen_states
from tests.support.examples import examples
from tests.support.page_paths import paths, texts_of_prompts

PAGES = 5
POLICIES: dict[str, EvictionPolicy] = {
    "lru": LeastRecentlyUsed(),
    "lfu": LeastFrequentlyUsed(),
    "fifo": FirstInFirstOut(),
    "worth": LEAST_WORTH,
}


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


@examples(60)
@given(texts=texts_of_prompts, capacity=st.integers(1, 12))
def test_least_recently_used_agrees_with_a_naive_model(
    texts: list[list[int]], capacity: int
) -> None:
    prompts = paths(texts)
    indexed, naive = IndexedPages(capacity, LeastRecentlyUsed()), NaivePages(capacity)
    assert found(indexed, prompts) == found(naive, prompts)
    assert indexed.evicted == naive.evicted


@examples(30)
@given(texts=texts_of_prompts, capacity=st.integers(1, 12))
def test_no_policy_finds_more_than_one_that_knows_the_future(
    texts: list[list[int]], capacity: int
) -> None:
    prompts = paths(texts)
    most = sum(found(ForeseenPages(capacity, prompts), prompts))
    for policy in POLICIES.values():
        assert sum(found(IndexedPages(capacity, policy), prompts)) <= most


def test_the_command_shows_a_policy_beside_others_and_the_most_possible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a prompt of two pages that comes back, and others between that do not."""
    path = tmp_path / "trace"
    file = RequestLines(path, TracedMemory(1, PAGES * 256), "pool")
    for now, shared in enumerate([0, 0, 2, 0, 2, 0, 2, 0, 2, 0, 0, 0, 2, 0, 0, 2]):
        file.arrive(now, 513, 10, 0, shared)
    file.finish()
    load = TracedLoad(read_trace(path), 256)

    def replayed(*options: str) -> Any:
        assert main(["trace", "replay", str(path), "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    for name, policy in POLICIES.items():
        shown = replayed("--eviction", name)["reuse"]
        assert shown.keys() == {name, "lru", "most"}
        for key, reuse in ((name, replay_reuse(load, policy)), ("most", most_reuse(load))):
            assert shown[key] == vars(reuse) | {"share": reuse.share}
    shown = replayed("--max-kv-bytes", "256000")["reuse"]
    assert {each["tokens_found"] for each in shown.values()} == {6 * 512}
    states = foreseen_states(load, 2)
    shown = replayed("--states", "2")["states"]
    assert shown["foreseen"] == vars(states) | {"share": states.share}
    assert states.tokens_found == 6 * 512
    assert main(["trace", "replay", str(path), "--admission", "reserve", "--states", "2"]) == 0
    text = capsys.readouterr().out
    assert "block tables" not in text
    for part in ("pages, by eviction policy", "with foresight", "running at once, at most"):
        assert part in text
