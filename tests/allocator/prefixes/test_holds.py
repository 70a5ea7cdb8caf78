"""Holds end at a time, are bounded, and give way where others need their memory."""

import threading
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.server.engine.prompt_fetcher import PromptReuse
from tests.support.zoo import small_model

BLOCK_BYTES = 64
PAGE = 4
ALL = [*range(100)]
TEXT = [(11 * i * i + 5 * i + 7) % 97 for i in range(2000)]
HOUR_S = 3600.0


class Cached:
    """Prompts in an index, each block of which takes 1 / 128 of the memory. 40 may be held."""

    def __init__(self) -> None:
        self.allocator = BlockAllocator(ByteBudget(100 * BLOCK_BYTES), BLOCK_BYTES, PAGE)
        self.index = PrefixIndex(PAGE, threading.RLock())
        self.holds = self.index.holds

    def insert(self, tokens: list[int], namespace: str = "a") -> None:
        """Cache a prompt in blocks of its own; those that the index has already are free again."""
        count = -(-len(tokens) // PAGE)
        self.allocator.ensure_free({self.allocator.page_format: count}, 0)
        blocks = self.allocator.allocate(count)
        self.index.insert(namespace, tokens, [{self.allocator: block} for block in blocks])
        self.allocator.release(blocks)

    def hold(self, tokens: list[int], until: float, namespace: str = "a") -> None:
        path = self.index.known(namespace, tokens).nodes
        self.holds.hold(namespace, path, until, lambda _: 1 / 128, 40 / 128)

    def found(self, tokens: list[int], namespace: str = "a") -> int:
        return self.index.known(namespace, tokens).num_tokens


def test_a_held_prefix_is_not_evicted_until_its_time_comes() -> None:
    cached = Cached()
    cached.insert(ALL[:20])
    cached.hold(ALL[:12], until=5)
    assert cached.holds.next_end == 5
    cached.holds.expire(4.9)
    cached.index.forget()
    assert (cached.found(ALL[:20]), cached.holds.num_pinned) == (12, 3)
    cached.holds.expire(5)
    assert cached.holds.num_pinned == 0
    cached.index.forget()
    assert cached.found(ALL[:20]) == 0


def test_a_later_use_holds_longer_and_a_shorter_one_not_less() -> None:
    cached = Cached()
    cached.insert(ALL[:20])
    cached.hold(ALL[:20], until=5)
    cached.hold(ALL[:12], until=9)
    cached.hold(ALL[:20], until=3)
    cached.holds.expire(4)
    assert cached.holds.num_pinned == 5
    cached.holds.expire(5)
    assert cached.holds.num_pinned == 3
    assert cached.holds.next_end == 9
    cached.holds.expire(9)
    assert cached.holds.num_pinned == 0


def test_a_longer_prompt_takes_over_the_pin_of_its_last_block() -> None:
    """Else every turn of a conversation would leave a block behind."""
    cached = Cached()
    cached.insert(ALL[:10])
    cached.hold(ALL[:10], until=5)
    cached.insert(ALL[:18])
    assert (len(cached.index), cached.holds.num_pinned) == (5, 3)
    cached.index.forget()
    assert cached.found(ALL[:18]) == 12
    cached.holds.expire(5)
    cached.index.forget()
    assert len(cached.index) == 0


def test_one_namespace_holds_half_of_what_may_be_held_and_its_latest_prompts() -> None:
    cached = Cached()
    for first in range(3):
        prompt = [first, *ALL[1:32]]
        cached.insert(prompt)
        cached.hold(prompt, until=first)
    assert cached.holds.num_pinned == 20
    cached.index.forget()
    # The end of a prompt goes before its beginning.
    assert [cached.found([first, *ALL[1:32]]) for first in range(3)] == [16, 32, 32]


def test_beyond_the_bound_the_namespace_that_holds_most_gives_way() -> None:
    cached = Cached()
    for number, (namespace, pages) in enumerate([("a", 12), ("b", 20), ("c", 4), ("d", 8)]):
        prompt = ALL[: PAGE * pages]
        cached.insert(prompt, namespace)
        cached.hold(prompt, 100 - number, namespace)
    cached.index.forget()
    held = [cached.found(ALL, namespace) // PAGE for namespace in "abcd"]
    assert held == [12, 16, 4, 8]


def test_eviction_ends_holds_when_nothing_else_is_left_the_first_to_end_before_others() -> None:
    cached = Cached()
    for first, until in ((0, 9.0), (1, 5.0), (2, 7.0)):
        cached.insert([first, *ALL[1:16]])
        cached.hold([first, *ALL[1:16]], until)
    cached.insert([3, *ALL[1:16]])
    assert cached.index.evict(lambda: len(cached.index) <= 12) == 4
    assert [cached.found([first, *ALL[1:16]]) for first in range(4)] == [16, 16, 16, 0]
    assert cached.index.evict(lambda: len(cached.index) <= 7) == 5
    assert [cached.found([first, *ALL[1:16]]) for first in range(4)] == [16, 0, 12, 0]
    cached.index.evict(lambda: False)
    assert (len(cached.index), cached.holds.num_pinned) == (0, 0)


def computed(model: Any, reuse: PromptReuse, tokens: list[int], salt: str) -> None:
    (factory,) = reuse.factories
    cache, cached = factory.fetch_cache(tokens, salt=salt)
    model(mx.array([tokens[cached:]]), cache=cache)
    reuse.insert(tokens, cache, salt)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
@pytest.mark.slow
def test_a_held_prompt_outlives_the_prompts_of_others_with_windows_and_states_too(
    name: str,
) -> None:
    model = small_model(name)
    factory = PagedCacheFactory(model, max_bytes="8MB")
    reuse = PromptReuse([factory], held_share=0.5)
    reuse.advance(100.0)
    for salt in ("alice", "bob"):
        computed(model, reuse, TEXT[:600], salt)
    reuse.hold(TEXT[:600], HOUR_S, "alice")
    assert factory.stats().pages_pinned == 3
    factory.clear()
    reuse.advance(100.0 + HOUR_S - 1)
    found = {salt: factory.peek([*TEXT[:600], 1], salt=salt)[0] for salt in ("alice", "bob")}
    assert found == {"alice": 600, "bob": 0}
    reuse.advance(100.0 + HOUR_S)
    assert factory.stats().pages_pinned == 0
    factory.clear()
    assert factory.peek([*TEXT[:600], 1], salt="alice")[0] == 0
    factory.pool.check()


@pytest.mark.slow
def test_what_is_held_gives_way_to_steps_and_to_snapshots() -> None:
    model = small_model("qwen3_next", num_hidden_layers=2)
    factory = PagedCacheFactory(model, max_bytes="1MB")
    reuse = PromptReuse([factory], held_share=1.0)
    for first in range(8):
        computed(model, reuse, [first, *TEXT[1:700]], str(first))
        reuse.hold([first, *TEXT[1:700]], HOUR_S, str(first))
    assert factory.stats().pages_pinned > 0
    room = factory.prefixes.snapshots.max_bytes
    factory.prefixes.snapshots.max_bytes = factory.prefixes.snapshots.nbytes
    computed(model, reuse, TEXT[:900], "new")
    assert factory.peek([*TEXT[:900], 1], salt="new")[0] == 900
    factory.prefixes.snapshots.max_bytes = room
    # A sequence that needs all of the memory gets it.
    cache = factory.make_cache()
    for _ in range(40):
        model(mx.array([TEXT[:100]]), cache=cache)
        if factory.stats().pages_pinned == 0:
            break
    assert factory.stats().pages_pinned == 0
