"""A replay finds what a prefix index with the same policy would find, and no policy finds more than
one that knows the future."""

from hypothesis import given
from hypothesis import strategies as st

from paged_kv.allocator.prefixes.eviction import (
    LEAST_WORTH,
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
)
from paged_kv.trace.reuse_replay import (
    Cache,
    ForeseenPages,
    IndexedPages,
)
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


@examples(30)
@given(texts=texts_of_prompts, capacity=st.integers(1, 12))
def test_no_policy_finds_more_than_one_that_knows_the_future(
    texts: list[list[int]], capacity: int
) -> None:
    prompts = paths(texts)
    most = sum(found(ForeseenPages(capacity, prompts), prompts))
    for policy in POLICIES.values():
        assert sum(found(IndexedPages(capacity, policy), prompts)) <= most
