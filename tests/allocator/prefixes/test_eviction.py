"""Eviction policies: one decides for prefixes, out-of-window blocks, snapshots and the store."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv import (
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LeastWorth,
    PagedCacheFactory,
    PagePool,
)
from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes.eviction import EvictionOrder
from paged_kv.allocator.prefixes.out_of_window_blocks import OutOfWindowBlock, OutOfWindowBlocks
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.prefixes.uses import Use
from paged_kv.prefix.snapshots import Snapshots, live_snapshots
from tests.support.examples import examples
from tests.support.store_entries import entry, links, open_store, prompt
from tests.support.zoo import small_model

PAGE = 4
# The entries that are evicted first, after a, b and c were stored, a used twice more, and b once.
FIRST: dict[EvictionPolicy, str] = {
    LeastRecentlyUsed(): "cab",
    LeastFrequentlyUsed(): "cba",
    FirstInFirstOut(): "abc",
    LeastWorth(): "cba",
}
USES = "aab"
POLICIES = pytest.mark.parametrize("policy", FIRST, ids=lambda each: type(each).__name__)


@POLICIES
def test_an_order_follows_its_policy(policy: EvictionPolicy) -> None:
    order: EvictionOrder[str] = EvictionOrder(policy)
    for name in "abc" + USES:
        order.touch(name)
    assert "".join(order) == FIRST[policy]
    assert [order.index(name) for name in FIRST[policy]] == [0, 1, 2]
    order.discard("b")
    order.discard("b")
    assert "".join(order) == FIRST[policy].replace("b", "")
    assert "b" not in order
    assert len(order) == 2


@POLICIES
def test_prefixes(policy: EvictionPolicy) -> None:
    index, prompts = PrefixIndex(PAGE, policy=policy), _prompts("abc")
    allocator = BlockAllocator(ByteBudget(1000), 1, PAGE)
    for tokens in prompts.values():
        _insert(index, allocator, tokens)
    for name in USES:
        index.match(None, [*prompts[name], 0])
    for name in FIRST[policy]:
        assert tuple(prompts[name]) in {node.tokens for node in index.nodes()}
        _evict_one(index)
        assert tuple(prompts[name]) not in {node.tokens for node in index.nodes()}


class OwnOrder:
    """Ranks uses as the test says."""

    def __init__(self, ranks: dict[int, float]) -> None:
        self.ranks = ranks

    def rank(self, use: Use) -> float:
        return self.ranks.get(use.first, 0)


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=6),
    st.dictionaries(st.integers(1, 12), st.integers(0, 3).map(float)),
    st.sets(st.integers(0, 5)),
)
@examples(60)
def test_whatever_a_policy_says_all_goes_that_may_go(
    paths: list[list[int]], ranks: dict[int, float], held: set[int]
) -> None:
    """Also if it ranks the beginning of a prompt before its continuation."""
    index = PrefixIndex(PAGE, policy=OwnOrder(ranks))
    allocator = BlockAllocator(ByteBudget(1000), 1, PAGE)
    for number, path in enumerate(paths):
        tokens = [part for part in path for _ in range(PAGE)]
        nodes = _insert(index, allocator, tokens)
        if number in held:
            allocator.retain([nodes[-1].blocks[allocator]])
    kept = {node for node in index.nodes() if allocator.ref_count(node.blocks[allocator]) > 1}
    for node in list(kept):
        while node.parent is not None:
            kept.add(node)
            node = node.parent
    index.evict(lambda: False)
    assert set(index.nodes()) == kept


def test_a_parent_that_ranks_before_a_leaf_in_use_is_evicted() -> None:
    index = PrefixIndex(PAGE, policy=OwnOrder({1: 1.0, 3: 0.0, 4: 2.0}))
    allocator = BlockAllocator(ByteBudget(1000), 1, PAGE)
    (in_use,) = _insert(index, allocator, [1] * PAGE)
    allocator.retain([in_use.blocks[allocator]])
    parent, child = _insert(index, allocator, [2] * PAGE + [3] * PAGE)
    assert [node.use.first for node in (in_use, parent, child)] == [1, 3, 4]
    index.evict(lambda: False)
    assert index.nodes() == [in_use]


@POLICIES
def test_out_of_window_blocks(policy: EvictionPolicy) -> None:
    allocator, blocks = BlockAllocator(ByteBudget(1000), 1, PAGE), OutOfWindowBlocks(policy)
    known = {}
    for name in "abc":
        (block,) = allocator.allocate(1)
        known[name] = blocks.cache(allocator, block)
        allocator.release([block])
    for name in USES:
        blocks.touch(known[name])
    for name in FIRST[policy]:
        assert known[name].block is not None
        _evict_one_out_of_window(blocks, list(known.values()))
        assert known[name].block is None


@POLICIES
def test_snapshots(policy: EvictionPolicy) -> None:
    snapshots, index, known = Snapshots(3, policy), PrefixIndex(PAGE), {}
    for name, tokens in _prompts("abc").items():
        path = index.insert(None, tokens, [{}])
        assert snapshots.keep(path, PAGE, [name], 1, is_answer=False)
        ((_, known[name]),) = live_snapshots(path[0])
    for name in USES:
        snapshots.touch(known[name])
    for left, name in zip((2, 1, 0), FIRST[policy], strict=True):
        assert known[name].states is not None
        snapshots.shrink(left)
        assert known[name].states is None


@POLICIES
def test_the_store(policy: EvictionPolicy, tmp_path: Path) -> None:
    # A folder keeps no half-lives.
    known = LeastRecentlyUsed() if policy == LeastWorth() else policy
    assert _stored_order(policy, tmp_path) == FIRST[known]


def test_a_broken_policy_breaks_no_store(tmp_path: Path) -> None:
    order = _stored_order(Broken(RuntimeError("broken")), tmp_path)
    assert order == FIRST[LeastRecentlyUsed()]


def _stored_order(policy: EvictionPolicy, folder: Path) -> str:
    keys: dict[str, str] = {}
    with open_store(folder, policy=policy) as store:
        for seed, name in enumerate("abc"):
            (link, *_) = links(prompt(seed))
            store.put([entry(link)])
            (keys[name],) = {row.key for row in store.rows()} - set(keys.values())
        for name in USES:
            store.touch([keys[name]])
        names = {key: name for name, key in keys.items()}
        return "".join(names[key] for key in store.eviction_order())


@POLICIES
def test_a_factory_hands_its_policy_to_all_of_them(policy: EvictionPolicy, tmp_path: Path) -> None:
    factory = PagedCacheFactory(
        small_model("lfm2"), max_bytes=1 << 24, store=tmp_path / "s", eviction_policy=policy
    )
    assert factory.pool.eviction_policy is policy
    assert factory.store is not None
    orders: list[Any] = [
        factory.pool.index._leaves,
        factory.pool.out_of_window._order,
        factory.prefixes.snapshots._order,
    ]
    assert all(order._rank.policy is policy for order in orders)
    assert factory.store.folder is not None
    assert factory.store.folder.store._policy is policy
    factory.close()


class Broken:
    """Returns what it is given, or raises it."""

    def __init__(self, rank: Any) -> None:
        self.answer = rank

    def rank(self, use: Use) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [float("nan"), None, "first", RuntimeError("broken")], ids=repr)
def test_a_broken_policy_evicts_what_was_not_used_for_longest(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that stores or evicts goes on, and one warning names the policy."""
    policy, least = Broken(answer), FIRST[LeastRecentlyUsed()]
    order: EvictionOrder[str] = EvictionOrder(policy)
    for name in "abc" + USES:
        order.touch(name)
    assert "".join(order) == least
    (warning,) = caplog.messages
    assert "Broken object" in warning
    assert "must return a number" in warning


class NoNumber:
    def rank(self, use: Use) -> Any:
        return "first"


def test_what_many_prompts_use_stays_longer_than_what_was_just_stored() -> None:
    """And not for ever: the half-life is twice the mean time until a use."""
    order: EvictionOrder[str] = EvictionOrder(LeastWorth())
    for name in ("often", *["x"] * 4, "often", *["x"] * 4, "often"):
        order.touch(name)
    for name in ("once", "other"):
        order.touch(name)
    assert list(order)[:2] == ["once", "other"]
    for number in range(100):
        order.touch(str(number))
    assert order.index("often") < 30


@pytest.mark.parametrize("policy", ["lru", LeastRecentlyUsed, NoNumber(), None])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(TypeError, match=r"eviction_policy must be an object whose rank\(use\)"):
        PagePool(1, max_bytes=1 << 20, eviction_policy=policy)


def _prompts(names: str) -> dict[str, list[int]]:
    return {name: [number] * PAGE for number, name in enumerate(names, 1)}


def _insert(index: PrefixIndex, allocator: BlockAllocator, tokens: list[int]) -> Any:
    blocks = allocator.allocate(len(tokens) // PAGE)
    nodes = index.insert(None, tokens, [{allocator: block} for block in blocks])
    allocator.release(blocks)
    return nodes


def _evict_one(index: PrefixIndex) -> None:
    before = len(index)
    index.evict(lambda: len(index) < before)


def _evict_one_out_of_window(blocks: OutOfWindowBlocks, known: list[OutOfWindowBlock]) -> None:
    def left() -> int:
        return sum(each.block is not None for each in known)

    before = left()
    blocks.evict(lambda: left() < before)
