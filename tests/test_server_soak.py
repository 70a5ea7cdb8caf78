"""Mixed traffic for a while: memory does not grow, and nothing is left at the end.

PAGED_KV_SOAK_S sets the seconds: 60 by default, 600 before a release.
"""

import asyncio
import gc
import json
import os
import random
import resource
import threading
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.bad_requests import TEXT, bad_requests
from tests.conftest import MODEL_FOLDERS
from tests.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
)

SOAK_S = float(os.environ.get("PAGED_KV_SOAK_S", "60"))
CLIENTS = 12
# An idle server may hold this much more after a part of the soak than at its beginning.
GROWTH_BYTES = 48 << 20
GO_ON = {"0": -1000}


async def ask(running: PagedRunningServer, body: bytes, reads: int | None) -> int:
    """The status of an answer, or 0 for a client that leaves after so many bytes of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    await writer.drain()
    try:
        reading = asyncio.ensure_future(reader.read(-1 if reads is None else reads))
        answer = await while_computing(running, reading)
        return int(answer.split()[1]) if reads is None else 0
    finally:
        writer.close()


async def while_computing(running: PagedRunningServer, reading: asyncio.Future[bytes]) -> bytes:
    """An answer. The client waits as long as the server computes: 800 tokens, among those of
    others, take minutes on a busy machine."""
    metrics = running.service.metrics
    before = -1
    while not reading.done():
        computed = metrics.generation_tokens + metrics.prompt_tokens
        assert computed != before, "a request was forgotten: nothing was computed for minutes"
        before = computed
        await asyncio.wait({reading}, timeout=PATIENCE_S)
    return reading.result()


def bodies(rng: random.Random) -> Any:
    """A random kind of request, and how much of its answer the client reads."""
    bad = [each for group in bad_requests().values() for each in group if each.path == TEXT]
    while True:
        said: dict[str, Any] = {
            "prompt": [rng.choice((3, 5, 7))] * rng.randrange(1, 900),
            "max_tokens": rng.randrange(1, 60),
            "stream": rng.random() < 0.5,
            "cache_salt": rng.choice("abc"),
            "temperature": rng.choice((0, 0.7)),
            "n": rng.choice((1, 1, 1, 3)),
            "seed": rng.choice((None, 5)),
            "logit_bias": GO_ON,
        }
        kind = rng.random()
        if kind < 0.1:
            yield rng.choice(bad).content, None
        elif kind < 0.3:
            yield json.dumps(said | {"max_tokens": 800}).encode(), rng.choice((0, 1, 300))
        else:
            yield json.dumps(said).encode(), None


async def traffic(running: PagedRunningServer, seconds: float, rng: random.Random) -> Counter[int]:
    """The number of answers of each status."""
    statuses: Counter[int] = Counter()
    until, asked = monotonic() + seconds, bodies(rng)

    async def client() -> None:
        while monotonic() < until:
            body, reads = next(asked)
            statuses[await ask(running, body, reads)] += 1

    await asyncio.gather(*[client() for _ in range(CLIENTS)])
    return statuses


def held(running: PagedRunningServer) -> dict[str, int]:
    """The memory that an idle server holds, without its cache."""
    assert_idle_pools_hold_nothing(running)
    gc.collect()
    proc = Path("/proc/self")
    if proc.exists():
        resident = int((proc / "statm").read_text().split()[1]) * resource.getpagesize()
        return {"bytes": resident, "threads": threading.active_count(),
                "files": len(list((proc / "fd").iterdir()))}  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"bytes": peak, "threads": threading.active_count(), "files": 0}


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 600)
def test_a_server_holds_no_more_after_a_soak_than_after_its_beginning() -> None:
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", "24MB"]
    rng = random.Random(7)
    with in_float32(), paged_server(*options, "--prefill-step-size", "256") as running:
        asyncio.run(traffic(running, SOAK_S / 4, rng))
        before = held(running)
        statuses = asyncio.run(traffic(running, SOAK_S * 3 / 4, rng))
        after = held(running)
    assert set(statuses) <= {0, 200, 400, 404, 503}
    assert statuses[200] > 10
    assert min(statuses[0], statuses[400] + statuses[404]) > 0
    assert after["bytes"] - before["bytes"] < GROWTH_BYTES
    assert after["threads"] <= before["threads"] + 1
    assert after["files"] <= before["files"] + 2
