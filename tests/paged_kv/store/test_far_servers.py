"""Servers far away: few round trips, and waits that are bounded for a whole prompt."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paged_kv.store import tier as tier_module
from paged_kv.store.blob_store import BlobStore
from paged_kv.store.entry_file import Entry, Seal
from paged_kv.store.keys import Link, Wanted
from paged_kv.store.options import RedisAddress, parse_address
from paged_kv.store.tier import Patience, Tier
from paged_kv.store.tiered_store import TieredStore, open_blobs
from tests.support.far_servers import far_away
from tests.support.memory_blobs import Memory
from tests.support.store_entries import PAGE_SIZE, PAGES, entry, identity, is_right, links, prompt
from tests.support.tier_servers import SECRET, redis_server

SEAL = Seal(SECRET)
PATIENCE_S = BlobStore.patience_s
BLOCKS = 60
TOKENS = prompt(0, BLOCKS * PAGE_SIZE)
WANTED = Wanted(Link.root(identity()), TOKENS, 0, 0, (PAGES,), False, PAGE_SIZE)


@contextmanager
def store_with(blobs: BlobStore) -> Iterator[TieredStore]:
    store = TieredStore([Tier(blobs)])
    try:
        yield store
    finally:
        store.close()


def fill(store: TieredStore) -> None:
    for link in links(TOKENS):
        made = entry(link)
        store.save(made, store.tiers_missing(made.place, made.nbytes))
    assert store.flush()


def read(store: TieredStore) -> list[Entry]:
    """What can be had of the prompt."""
    found = []
    for offer in store.offers(WANTED)[:1]:
        found = [each for each in store.read(offer) if each is not None]
    assert all(map(is_right, found))
    return found


@pytest.mark.slow
def test_sixty_blocks_take_a_few_round_trips(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, far_away(server.port) as far:
        with store_with(open_blobs(RedisAddress("127.0.0.1", server.port), SEAL)) as store:
            fill(store)
        with store_with(open_blobs(RedisAddress("127.0.0.1", far.port), SEAL)) as store:
            assert len(read(store)) == BLOCKS  # connects
            before = far.round_trips
            assert len(read(store)) == BLOCKS
            # Two; a server may answer the beginning of a question before it has all of it.
            assert before + 2 <= far.round_trips <= before + BLOCKS // 10


def test_a_prompt_waits_for_all_its_blocks_as_long_as_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each block comes in a round trip of its own, 0.16 s after the one before."""
    now = [0.0]

    def late(futures: list[Future[Any]], seconds: float) -> Any:
        (future,) = futures
        future.exception()  # it is there
        now[0] += min(seconds, 0.16)
        return type("Waited", (), {"done": {future} if seconds >= 0.16 else set()})

    monkeypatch.setattr(Memory, "get_bytes", 1)
    monkeypatch.setattr(tier_module, "wait", late)
    monkeypatch.setattr(tier_module, "monotonic", lambda: now[0])
    with store_with(Memory()) as store:
        fill(store)
        assert len(read(store)) == PATIENCE_S // 0.16
        assert store.servers[0].is_paused
    # The question, all entries that came, and the rest of the patience.
    assert now[0] == pytest.approx(0.16 + PATIENCE_S, rel=0.01)


def test_an_entry_that_is_read_again_is_waited_for_no_longer() -> None:
    patience = Patience(1.0)
    for key, seconds in (("a", 2.0), ("b", 4.0), ("a", 2.0)):
        patience.allow(key, seconds)
    assert patience.left == 7.0


@pytest.mark.slow
def test_a_redis_whose_handshake_outlasts_patience_is_used_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is being made when a prompt gives up serves the next one."""
    monkeypatch.setattr("paged_kv.store.writer.FIRST_S", 0.0)
    monkeypatch.setattr("paged_kv.store.writer.LONGEST_S", 0.0)
    monkeypatch.setenv("PASSWORD_OF_REDIS", "hunter2")

    def address(port: int) -> Any:
        return parse_address(f"redis://127.0.0.1:{port}/3?password=env:PASSWORD_OF_REDIS")

    with redis_server(tmp_path, "--requirepass", "hunter2") as server:
        with store_with(open_blobs(address(server.port), SEAL)) as store:
            fill(store)
        with (
            far_away(server.port, 0.4 * PATIENCE_S) as far,
            # It authenticates and chooses a database, each in a round trip.
            store_with(open_blobs(address(far.port), SEAL)) as store,
        ):
            assert len(read(store)) < BLOCKS
            assert any(len(read(store)) == BLOCKS for _ in range(20))
