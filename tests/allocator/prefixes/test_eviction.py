"""Eviction policies: one decides for prefixes, out-of-window blocks, snapshots and the store."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv import (
    BetterOfTwo,
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
from paged_kv.allocator.prefixes import eviction
from paged_kv.allocator.prefixes.eviction import (
    LEAST_RECENTLY_USED,
    EvictionOrder,
    Use,
    UseHistory,
)
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex
from tests.support.examples import examples
from tests.support.zoo import small_model

PAGE = 4
ROOM = 64
LFU = LeastFrequentlyUsed()
# What is used twice stays for ever with LFU, though it never returns.
PAST = [[page, 0] for page in range(ROOM - 4) for _ in range(3)]
LOOPS = [[1000 + page, 0] for _ in range(8) for page in range(ROOM // 2)]
# LRU loses favourites to what comes once.
FAVOURITES = [[page % 16 if page % 5 else 5000 + page, 0] for page in range(100)]
BURSTS = [[8000 + page, 0] for page in range(ROOM)]
SCANS = [*FAVOURITES, *(FAVOURITES[:80] + BURSTS) * 7]
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
            allocator.refs.retain([nodes[-1].blocks[allocator]])
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
    assert all(order.policy is policy for order in orders)
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


def advance(history: UseHistory, ticks: int) -> None:
    for _ in range(ticks):
        history.now()


def test_a_use_counts_half_after_twice_the_mean_time_until_a_use() -> None:
    history = UseHistory()
    use = history.first()
    assert (use.recent, use.half_life) == (1, 0)
    advance(history, 9)
    use = history.again(use)
    assert use.half_life == 20
    assert use.recent == pytest.approx(1 + 2**-0.5)
    advance(history, 29)
    use = history.again(use)
    assert use.half_life == 40
    assert use.recent == pytest.approx(1 + (1 + 2**-0.5) * 2 ** -(30 / 40))
    assert (use.first, use.last, use.times) == (1, 41, 3)


def test_storing_again_is_no_use_and_changes_no_worth() -> None:
    history = UseHistory()
    use = history.again(history.first())
    before = LeastWorth().rank(use)
    advance(history, 3)
    stored = history.stored(use)
    assert (stored.times, stored.half_life) == (use.times, use.half_life)
    assert stored.last > use.last
    assert LeastWorth().rank(stored) == pytest.approx(before)


def test_uses_before_an_eviction_count() -> None:
    history = UseHistory()
    use = history.again(history.again(history.first("a")))
    history.forget("a", use, 10)
    again = history.first("a", position=7)
    assert (again.first, again.times, again.position) == (again.last, 1, 7)
    assert again.recent > 2
    assert history.first("b").recent == 1
    assert history.first("a").recent == 1  # it was taken out


def test_what_is_remembered_is_bounded() -> None:
    """The latest ones stay."""
    for others, kept in ((0, 4), (2, 12), (1 << 20, 1 << 15)):
        history = UseHistory()
        count = kept + 5
        for key in range(count):
            history.forget(key, Use(1, 1), others)
        assert list(history._gone) == list(range(5, count))


@given(st.lists(st.integers(0, 1 << 40), max_size=30))
@examples(60)
def test_whatever_the_times_are_a_worth_is_a_number(pauses: list[int]) -> None:
    history = UseHistory()
    use = history.first()
    clock: Any = history
    for pause in pauses:
        clock._clock = iter(range(use.last + pause + 1, use.last + pause + 3))
        use = history.again(use)
        assert 1 <= use.recent <= use.times
        assert use.last <= LeastWorth().rank(use) < 2**50
        clock._clock = iter(range(use.last + 1, 1 << 62))


class Pages:
    """Caches the pages of prompts, a token each, in an index; `found` prompts found theirs."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.index = PrefixIndex(page_size=1, policy=policy)
        self.allocator = BlockAllocator(ByteBudget(8 * ROOM), block_bytes=1)
        self.found = 0

    def serve(self, prompts: list[list[int]]) -> "Pages":
        for prompt in prompts:
            self.found += self.index.match("", prompt).num_tokens
            self.index.evict(lambda: len(self.index) < ROOM)
            blocks = self.allocator.allocate(1)
            self.index.insert("", prompt[:1], [{self.allocator: blocks[0]}])
            self.allocator.release(blocks)
        return self


@pytest.mark.parametrize(("prompts", "best"), [(PAST + LOOPS, LEAST_RECENTLY_USED), (SCANS, LFU)])
def test_the_policy_that_finds_more_leads(
    prompts: list[list[int]], best: EvictionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_SAMPLE", 16)
    worse = LFU if best is LEAST_RECENTLY_USED else LEAST_RECENTLY_USED
    both = {policy: Pages(policy).serve(prompts).found for policy in (best, worse)}
    assert both[best] > both[worse] + ROOM
    pages = Pages(BetterOfTwo(worse, best)).serve(prompts)
    assert pages.found > both[worse] + ROOM
    assert pages.index._duel is not None
    assert pages.index._duel.policy is best


def test_what_is_removed_leaves_the_duel() -> None:
    pages = Pages(BetterOfTwo(FirstInFirstOut(), LFU)).serve(LOOPS[:3])
    pages.index.forget_prompt("", LOOPS[1][:1])
    assert pages.index._duel is not None
    assert len(pages.index._duel._leader) == 2


def _insert(index: PrefixIndex, allocator: BlockAllocator, tokens: list[int]) -> Any:
    blocks = allocator.allocate(len(tokens) // PAGE)
    nodes = index.insert(None, tokens, [{allocator: block} for block in blocks])
    allocator.release(blocks)
    return nodes
