"""Eviction policies: one decides for prefixes, out-of-window blocks, snapshots and the store."""

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
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from paged_kv.allocator.prefixes.uses import Use
from tests.support.examples import examples
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


class Broken:
    """Returns what it is given, or raises it."""

    def __init__(self, rank: Any) -> None:
        self.answer = rank

    def rank(self, use: Use) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


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


def test_a_factory_hands_its_policy_to_all_of_them() -> None:
    policy = FirstInFirstOut()
    factory = PagedCacheFactory(small_model("lfm2"), max_bytes=1 << 24, eviction_policy=policy)
    assert factory.pool.eviction_policy is policy
    orders: list[Any] = [
        factory.pool.index._leaves,
        factory.pool.out_of_window._order,
        factory.prefixes.snapshots._order,
    ]
    assert all(order._rank.policy is policy for order in orders)
    factory.close()


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


@pytest.mark.parametrize("policy", ["lru", LeastRecentlyUsed, Broken("first"), None])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(TypeError, match="eviction_policy"):
        PagePool(1, max_bytes=1 << 20, eviction_policy=policy)


def _insert(index: PrefixIndex, allocator: BlockAllocator, tokens: list[int]) -> Any:
    blocks = allocator.allocate(len(tokens) // PAGE)
    nodes = index.insert(None, tokens, [{allocator: block} for block in blocks])
    allocator.release(blocks)
    return nodes
