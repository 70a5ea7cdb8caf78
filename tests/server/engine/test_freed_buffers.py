"""While a server has a model, MLX keeps few freed buffers, and arrays do not become more."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import mlx.core as mx
import pytest

from paged_kv.kernels.pages.memory import limited_freed_buffers
from paged_kv.server.engine.freed_buffers import freed_buffers_limit
from tests.support.live_arrays import live_arrays
from tests.support.running_server import paged_server
from tests.support.server_process import metrics, post

OPTIONS = ["--max-kv-bytes", "64MB"]
# Of each round. One array for each request would be noticed.
REQUESTS, FEW = 25, 10
FORMER = 123 << 20  # more than any server here allows


@pytest.fixture(autouse=True)
def _former() -> Iterator[None]:
    before = mx.set_cache_limit(FORMER)
    yield
    assert limit() == FORMER
    mx.set_cache_limit(before)


def limit() -> int:
    """MLX's limit of freed buffers, which only setting it tells."""
    found = mx.set_cache_limit(FORMER)
    mx.set_cache_limit(found)
    return found


def test_a_smaller_limit_stays() -> None:
    with limited_freed_buffers(FORMER + 1):
        assert limit() == FORMER
    with limited_freed_buffers(5):
        assert limit() == 5
    assert limit() == FORMER


def test_a_server_limits_freed_buffers_until_it_ends(tiny: str) -> None:
    options = ["--model", tiny, *OPTIONS, "--prefill-step-size", "300"]
    with paged_server(*options) as running:
        assert limit() == freed_buffers_limit(running.provider.model, 300) < FORMER
        assert metrics(running.port)["mlx_active_bytes"] > 0
    assert limit() == FORMER


@pytest.mark.slow
def test_requests_of_mixed_lengths_leave_nothing_behind(tiny: str) -> None:
    rng = random.Random(3)

    def ask(_: int) -> int:
        prompt = rng.choices(range(10, 4000), k=round(16 * 60 ** rng.random()))
        answer = post(running.port, prompt=prompt, max_tokens=rng.randint(1, 24))
        answer.read()
        return answer.status

    with paged_server("--model", tiny, *OPTIONS, "--prefill-step-size", "64") as running:
        allowed, counts, kept, ended = limit(), list[int](), list[int](), Event()
        watching = Thread(target=lambda: watch(kept, ended))
        watching.start()
        with ThreadPoolExecutor(8) as clients:
            for _ in range(3):  # the first round fills what is kept
                assert {*clients.map(ask, range(REQUESTS))} == {200}
                running.wait_until_idle()
                for pool in running.pools:
                    pool.clear()
                counts.append(live_arrays())
        ended.set()
        watching.join()
    assert 0 < max(kept) <= allowed
    assert counts[-1] < counts[0] + FEW


def watch(kept: list[int], ended: Event) -> None:
    """Note what MLX keeps of freed buffers, every millisecond."""
    while not ended.wait(0.001):
        kept.append(mx.get_cache_memory())
