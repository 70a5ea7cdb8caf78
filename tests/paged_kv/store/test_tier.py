"""What a tier on a server takes for stored, and for what was asked."""

from threading import Event

import pytest

from paged_kv.store import keys
from paged_kv.store.entry_file import OtherEntry
from paged_kv.store.keys import EntryPlace, Link, Wanted
from paged_kv.store.tier import Tier, Waits
from paged_kv.store.tiered_store import PrefetchBuffer, TieredStore
from paged_kv.store.writer import FULL, PAUSED
from tests.support.memory_blobs import Memory
from tests.support.store_entries import PAGES, entry, identity, is_right, links, others, prompt

CHAIN = [entry(link) for link in links(prompt(0, 256 * 3))]


def test_what_a_server_has_not_taken_is_not_known_to_be_there() -> None:
    memory = Memory()
    memory.is_full = True
    tier = Tier(memory)
    try:
        for each in CHAIN:
            tier.queue.save(each)
        assert tier.queue.flush()
        # The first has failed, and the others have come during the pause.
        assert memory.calls == [("put", 1)]
        assert tier.counts.dropped == {FULL: 1, PAUSED: len(CHAIN) - 1}
        assert not any(tier.queue.knows(each.place.key) for each in CHAIN)
    finally:
        tier.close()


def test_what_waits_to_be_written_is_not_written_twice_though_nobody_finds_it() -> None:
    tier, may_write = Tier(Memory()), Event()
    try:
        tier.queue.do(may_write.wait, is_first=True)
        tier.queue.save(CHAIN[0])
        wanted = Wanted(Link.root(identity()), prompt(0, 256 * 3)[:256], 0, 0, (PAGES,), False, 256)
        assert not tier.ask(wanted, Waits())
        assert tier.queue.knows(CHAIN[0].place.key)
    finally:
        may_write.set()
        tier.close()


def test_what_was_read_in_advance_counts_for_its_tier_where_a_nearer_one_adds_to_it() -> None:
    memory = Memory()
    memory.is_shared = False
    store = TieredStore([Tier(memory)])
    try:
        store.save(CHAIN[0], store.tiers)
        assert store.flush()
        store.prefetched = PrefetchBuffer()
        store.prefetched.put(CHAIN[1], "far")
        wanted = Wanted(Link.root(identity()), prompt(0, 256 * 3)[:512], 0, 0, (PAGES,), False, 256)
        offer, *_ = store.offers(wanted)
        assert (offer.tier, offer.is_prefetched, offer.stored.num_tokens) == ("far", True, 512)
        assert all(read is not None and is_right(read) for read in store.read(offer))
    finally:
        store.close()


@pytest.fixture
def _one_hash_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_digest", lambda *_: "5" * 64)


@pytest.mark.usefixtures("_one_hash_for_all")
def test_what_collides_is_told_apart() -> None:
    """All have one key, so what is read must be compared with what was asked for."""
    stored = entry(Link.root(identity()).then([1, 2]).then([3, 4]))
    memory = Memory()
    tier, waits = Tier(memory), Waits()
    try:
        tier.queue.save(stored)
        assert tier.queue.flush()
        (nbytes,) = map(len, memory.blobs.values())
        asked = [(stored.place, True), *((EntryPlace(link, PAGES), False) for link in others())]
        for place, is_there in asked:
            (found,) = tier.read([(place, nbytes)], waits)
            assert (found is not None and is_right(found)) == is_there
        assert tier.counts.errors == {OtherEntry.kind: len(others())}
    finally:
        tier.close()
