"""Times tiers on servers of this machine: python -m benches.tiers

    read           entries of 16 MB, from a folder in the page cache and from Redis on loopback,
                   read ahead and verified, in turns
    first token    of a prompt of 8,192 tokens on stdlib-llama in float32: computed, and found on
                   Redis by a factory that has nothing else, in turns
    other server   the first token of a prompt of 4,096 tokens from a server that computes it, and
                   from one that another process computes it for, in turns; the processor's time
                   that the waiting process takes; and what eight running texts lose meanwhile. Both
                   processes share the cores of one machine, which is the worst case

Each figure is the median of its repetitions.
"""

from benches.openblas import BLAS

import os
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np

from benches.models import load_model, random_tokens
from benches.page_store import MEMORY, computed_and_found
from benches.results_file import write_result
from benches.serving_http import events
from paged_kv import PagedCacheFactory, StoreOptions
from paged_kv.integrations.bench.turns import ratio, seconds
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.store.entry_file import Entry
from paged_kv.store.keys import EntryPlace, Identity, Link, Wanted
from paged_kv.store.options import store_addresses
from paged_kv.store.tiered_store import TieredStore, open_tiers
from tests.support.server_process import server_process
from tests.support.tier_servers import SECRET, redis_server

ENTRIES, ENTRY_BYTES, ROUNDS = 16, 16 << 20, 7
PROMPT, TURNS = 8192, 2
HANDED, QUIET_TURNS, BUSY_TURNS = 4096, 9, 3
RUNNING, QUIET_S = 8, 4.0


def main() -> None:
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name)) as server:
        folder = Path(name)
        secret = folder / "secret"
        secret.write_bytes(SECRET)
        options = StoreOptions(secret=secret)
        figures = {
            "blas": BLAS,
            "read": read(folder / "pages", server.address, options),
            "first_token": times_to_first_token(server.address, options),
            "other_server": other_server(server.address, secret),
        }
    write_result("tiers", figures)


def read(folder: Path, address: str, options: StoreOptions) -> dict[str, Any]:
    """Bytes a second of both tiers."""
    numbers = np.random.default_rng(0)
    link = Link.root(Identity("bench", "", "", "", "", "fp16", "none", PAGE_SIZE))
    tokens, entries = random.Random(0).choices(range(1000), k=ENTRIES * PAGE_SIZE), []
    wanted = Wanted(link, tokens, 0, 0, ("pages 0",), False, PAGE_SIZE)
    for start in range(0, len(tokens), PAGE_SIZE):
        link = link.then(tokens[start : start + PAGE_SIZE])
        words = numbers.integers(0, 1 << 16, ENTRY_BYTES // 2, np.uint16)
        entries.append(Entry(EntryPlace(link, "pages 0"), {"layer.0": words}, ""))
    times: dict[str, list[float]] = {"folder": [], "redis": []}
    stores = {
        name: open_tiers(store_addresses(place), 4 << 30, options)
        for name, place in (("folder", folder), ("redis", address))
    }
    for store in stores.values():
        for entry in entries:
            store.save(entry, store.tiers_missing(entry.place, 0))
            store.flush()

    def read_all(store: TieredStore) -> None:
        (offer, *_) = store.offers(wanted)
        assert sum(entry is not None for entry in store.read(offer)) == ENTRIES

    for _ in range(ROUNDS):
        for name, store in stores.items():
            times[name].append(seconds(partial(read_all, store)))
    for store in stores.values():
        store.close()
    nbytes = ENTRIES * ENTRY_BYTES
    return {
        "entry_bytes": ENTRY_BYTES,
        **{f"{name}_bytes_per_second": nbytes / median(each) for name, each in times.items()},
        "redis_over_folder": ratio(times["folder"], times["redis"]),
    }


def times_to_first_token(address: str, options: StoreOptions) -> dict[str, Any]:
    """Seconds to the first token of a prompt, computed and found."""
    model, _ = load_model("stdlib-llama")
    tokens = random_tokens(model, PROMPT)

    def opened() -> PagedCacheFactory:
        return PagedCacheFactory(
            model, store=address, store_options=options, store_bytes=4 << 30, max_bytes=MEMORY
        )

    colds, founds, answers = computed_and_found(model, tokens, PROMPT - 1, opened, TURNS)
    return {
        "prompt_tokens": PROMPT,
        "computed_seconds": median(colds),
        "found_seconds": median(founds),
        "computed_over_found": ratio(colds, founds),
        "tokens_are_equal": len({token for token, _ in answers}) == 1,
    }


def other_server(address: str, secret: Path) -> dict[str, Any]:
    """What it gains and costs that another process computes a prompt."""
    tier = ("--store", address, "--store-secret", str(secret), "--dtype", "float32")
    common = (*tier, "--max-tokens", "2000", "--max-kv-bytes", "1GB")
    sides: dict[str, dict[str, list[float]]] = {
        name: {"quiet": [], "processor": [], "busy": [], "lost": []} for name in ("alone", "handed")
    }
    with ExitStack() as stack:
        alone, other = (stack.enter_context(served(common)) for _ in range(2))
        handing = ("--prefill-from", f"http://127.0.0.1:{other.port}", "--prefill-over", "500")
        servers = {"alone": alone, "handed": stack.enter_context(served((*common, *handing)))}
        prompts = (prompt(seed, HANDED) for seed in count(1000))
        # Nothing is loaded or grows for the first time later.
        for server in (other, *servers.values()):
            text(server.port, next(prompts), 2)
        for _ in range(QUIET_TURNS):
            for name, server in servers.items():
                before = server.processor_seconds
                sides[name]["quiet"].append(text(server.port, next(prompts), 1))
                sides[name]["processor"].append(server.processor_seconds - before)
        for _ in range(BUSY_TURNS):
            for name, server in servers.items():
                busy, lost = with_running(server.port, next(prompts))
                sides[name]["busy"].append(busy)
                sides[name]["lost"].append(lost)
    medians = {
        name: {what: median(values) for what, values in side.items()}
        for name, side in sides.items()
    }
    return {
        "prompt_tokens": HANDED,
        "running": RUNNING,
        **medians,
        "first_token_over_alone": ratio(sides["handed"]["quiet"], sides["alone"]["quiet"]),
        "lost_over_alone": medians["handed"]["lost"] / medians["alone"]["lost"],
    }


@dataclass(frozen=True)
class Served:
    """A server, and the port at which it listens."""

    pid: int
    port: int

    @property
    def processor_seconds(self) -> float:
        """What all its threads have taken so far, to the hundredth."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(options: tuple[str, ...]) -> Iterator[Served]:
    with server_process(*options) as (process, port):
        threading.Thread(target=process.stderr.read, daemon=True).start()  # type: ignore[union-attr]
        yield Served(process.pid, port)


def prompt(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(1, 500) for _ in range(length)]


def text(port: int, tokens: list[int], most: int) -> float:
    """Seconds to the first token of an answer."""
    began = perf_counter()
    return next(streamed(port, tokens, most)) - began


def streamed(port: int, tokens: list[int], most: int) -> Iterator[float]:
    """The times at which tokens of an answer come."""
    body = {"prompt": tokens, "max_tokens": most, "stream": True, "store": True}
    body |= {"logit_bias": {"0": -100}}
    for _ in events(port, body):
        yield perf_counter()


def with_running(port: int, tokens: list[int]) -> tuple[float, float]:
    """Seconds to a prompt's first token while texts run, and the share of their rate that they
    lose meanwhile."""
    times: list[float] = []
    is_over = threading.Event()

    def run(seed: int) -> None:
        for at in streamed(port, prompt(500 + seed, 100), 2000):
            times.append(at)
            if is_over.is_set():
                return

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(RUNNING)]
    for thread in threads:
        thread.start()
    sleep(QUIET_S)
    began = perf_counter()
    took = text(port, tokens, 1)
    is_over.set()
    for thread in threads:
        thread.join()
    before = sum(began - QUIET_S / 2 <= at < began for at in times) / (QUIET_S / 2)
    meanwhile = sum(began <= at < began + took for at in times) / took
    return took, 1 - meanwhile / before


if __name__ == "__main__":
    main()
