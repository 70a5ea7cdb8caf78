"""Kills servers and writers of a tier, and forges its entries: python -m benches.tier_faults

servers    kill -9 of a Redis on loopback at a random moment, while entries are asked for, read
           and written
writers    kill -9 of a process that writes entries; then everything that is there is read
forged     entries with flipped bits, cut off, exchanged, sealed with another secret, or random;
           an accepted one ends the bench
longest    seconds that any look-up or read kept its caller waiting
"""

import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from benches.results_file import write_result
from paged_kv import StoreOptions
from paged_kv.store.lookup import Wanted
from paged_kv.store.options import store_addresses
from paged_kv.store.tier import Waits
from paged_kv.store.tiered_store import TieredStore, open_tiers
from tests.support.store_damage import forged
from tests.support.store_entries import PAGE_SIZE, PAGES, entry, is_right, links, prompt
from tests.support.tier_servers import SECRET, RedisServer, redis_server

SERVER_KILLS, WRITER_KILLS, FORGED = 100, 100, 10_000
BLOCKS, WORDS = 24, 50_000
TOKENS = prompt(0, BLOCKS * PAGE_SIZE)
WRITER = """
import sys
from pathlib import Path
from benches.tier_faults import opened, put_all
store = opened(sys.argv[1], Path(sys.argv[2]))
print("writing", flush=True)
put_all(store)
store.flush()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name)) as server:
        secret = Path(name) / "secret"
        secret.write_bytes(SECRET)
        figures = {
            "servers": kill_servers(server, secret),
            "writers": kill_writers(server, secret),
            "forged": forge(server, secret),
        }
    print(figures)
    print(f"written to {write_result('tier_faults', figures)}")


def opened(address: str, secret: Path) -> TieredStore:
    """The tier alone."""
    return open_tiers(store_addresses(address), 1 << 30, StoreOptions(secret=secret))


def put_all(store: TieredStore) -> None:
    """Queue all entries."""
    for link in links(TOKENS):
        made = entry(link, words=WORDS)
        store.save(made, store.tiers_missing(made.place, made.nbytes))


def read_all(store: TieredStore) -> tuple[int, int, float]:
    """How many entries were read, how many of them were wrong, and the longest wait."""
    root = links(TOKENS)[0]
    wanted = Wanted(_root_of(root), TOKENS, 0, 0, (PAGES,), False, PAGE_SIZE)
    began, longest, found, wrong = perf_counter(), 0.0, 0, 0
    offers = store.offers(wanted)
    longest = perf_counter() - began
    for offer in offers[:1]:
        reads = iter(store.read(offer))
        while True:
            began = perf_counter()
            each = next(reads, None)
            longest = max(longest, perf_counter() - began)
            if each is None:
                break
            found, wrong = found + 1, wrong + (not is_right(each))
    return found, wrong, longest


def _root_of(first: Any) -> Any:
    from paged_kv.store.keys import Link

    return Link(first.identity, "", 0, (), "")


def kill_servers(server: RedisServer, secret: Path) -> dict[str, Any]:
    """Kill the server while entries are written, asked for and read."""
    rng, reads, wrong, longest = random.Random(0), 0, 0, 0.0
    for _ in range(SERVER_KILLS):
        store = opened(server.address, secret)
        put_all(store)
        store.flush()
        killer = threading.Timer(rng.uniform(0, 0.05), server.kill)
        killer.start()
        while killer.is_alive():
            found, bad, waited = read_all(store)
            reads, wrong, longest = reads + found, wrong + bad, max(longest, waited)
            put_all(store)
        found, bad, waited = read_all(store)
        longest = max(longest, waited)
        store.close()
        server.start()
    return {"kills": SERVER_KILLS, "reads": reads, "wrong": wrong, "longest_seconds": longest}


def kill_writers(server: RedisServer, secret: Path) -> dict[str, Any]:
    """Kill processes that write, and read what they leave."""
    rng, reads, wrong = random.Random(1), 0, 0
    for _ in range(WRITER_KILLS):
        server.client().flushall()
        command = [sys.executable, "-c", WRITER, server.address, str(secret)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            sleep(rng.uniform(0, 0.08))
            process.kill()
        store = opened(server.address, secret)
        found, bad, _ = read_all(store)
        reads, wrong = reads + found, wrong + bad
        store.close()
    return {"kills": WRITER_KILLS, "reads": reads, "wrong": wrong}


def forge(server: RedisServer, secret: Path) -> dict[str, Any]:
    """Forge entries, and read them."""
    rng, client = random.Random(2), server.client()
    client.flushall()
    store = opened(server.address, secret)
    put_all(store)
    store.flush()
    sound = {key: client.get(key) for key in client.scan_iter()}
    tried = accepted = 0
    (tier,) = store.servers
    wanted = Wanted(_root_of(links(TOKENS)[0]), TOKENS, 0, 0, (PAGES,), False, PAGE_SIZE)
    places = [entry(link, words=1).place for link in links(TOKENS)]
    while tried < FORGED:
        for key, data in forged(rng, sound).items():
            client.set(key, data)
        sizes = tier.ask(wanted, Waits())
        for place in places:
            tried += 1
            nbytes = sizes.get(place.key, 0)
            waits = Waits()
            (read,) = tier.read([(place, nbytes)], waits)
            accepted += bool(nbytes and read is not None)
    errors = dict(store.stats().errors)
    store.close()
    assert not accepted
    return {"entries": tried, "accepted": accepted, "errors": errors}


if __name__ == "__main__":
    main()
