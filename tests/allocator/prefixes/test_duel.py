"""Two policies duel: what each would have kept of a sample decides which of them ranks."""

import pytest

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes import duel
from paged_kv.allocator.prefixes.duel import BetterOfTwo
from paged_kv.allocator.prefixes.eviction import (
    LEAST_RECENTLY_USED,
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
)
from paged_kv.allocator.prefixes.prefix_index import PrefixIndex

ROOM = 64
LFU = LeastFrequentlyUsed()
# What is used twice stays for ever with LFU, though it never returns.
PAST = [[page, 0] for page in range(ROOM - 4) for _ in range(3)]
LOOPS = [[1000 + page, 0] for _ in range(8) for page in range(ROOM // 2)]
# LRU loses favourites to what comes once.
FAVOURITES = [[page % 16 if page % 5 else 5000 + page, 0] for page in range(100)]
BURSTS = [[8000 + page, 0] for page in range(ROOM)]
SCANS = [*FAVOURITES, *(FAVOURITES[:80] + BURSTS) * 7]


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
    monkeypatch.setattr(duel, "_SAMPLE", 16)
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
    assert len(pages.index._duel._leader._order) == 2
