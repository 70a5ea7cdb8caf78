"""Requests of one prefix that come together compute it once, and count its pages once."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paged_kv.server.engine.rows import Rows
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
    wait_until,
)
from tests.support.tiny_model import completion, tokens_of

NAME = "default_model"
# Never the token that ends a text.
GO_ON = {"0": -1000}
SHARED = tokens_of(0, 600)
CLIENTS = 4


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[PagedRunningServer]:
    # A step computes two of `prompts`.
    options = ["--max-kv-bytes", "64MB", "--prefill-step-size", "1300"]
    with paged_server("--model", tiny, *options) as started:
        yield started


def prompts() -> list[list[int]]:
    """All begin alike, and end differently."""
    return [[*SHARED, *range(100 + 10 * client, 105 + 10 * client)] for client in range(CLIENTS)]


@pytest.mark.parametrize(("salts", "waits"), [("ab", False), ("aa", True)])
def test_users_of_other_salts_do_not_wait_for_each_other(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch, salts: str, waits: bool
) -> None:
    """As they find nothing of each other."""
    steps, begun = [0], []

    def step(rows: Rows) -> Any:
        steps[0] += 1
        return original_step(rows)

    def begin(rows: Rows, *job: Any) -> None:
        begun.append(steps[0])
        original_begin(rows, *job)

    original_step, original_begin = Rows.step, Rows._record_begun
    monkeypatch.setattr(Rows, "step", step)
    monkeypatch.setattr(Rows, "_record_begun", begin)
    running.hold_until_submitted(2)
    with ThreadPoolExecutor(2) as clients:
        bodies = [{"cache_salt": salt} for salt in salts]
        list(clients.map(lambda body: completion(running, prompts()[0], extra_body=body), bodies))
    assert (begun[1] > begun[0]) == waits


def test_a_much_longer_prompt_waits_for_what_it_shares_with_a_shorter_one(
    running: PagedRunningServer,
) -> None:
    """Though it came first: the one with the least to compute goes first."""
    long = [*SHARED, *[(7 * i * i + i) % 500 + 1 for i in range(1000)]]
    running.hold_until_submitted(2)
    commands = running.service.thread._commands
    wait_until(commands.empty)  # the thread waits for both
    with ThreadPoolExecutor(2) as clients:
        first = clients.submit(completion, running, long)
        wait_until(lambda: commands.qsize() == 1)
        second = clients.submit(completion, running, prompts()[0])
    assert (first.result()[1], second.result()[1]) == (len(SHARED), 0)


@pytest.mark.slow
def test_shared_pages_count_once_for_all_that_begin() -> None:
    """Alone each takes 3 of the 7 blocks to begin, and behind a running one 1."""
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"])]
    block = 256 * 6 * 2 * 2 * 64 * 4
    with in_float32(), paged_server(*options, "--max-kv-bytes", str(7 * block)) as running:
        create = running.client().completions.create
        streams = [
            create(model=NAME, prompt=prompt, max_tokens=100, stream=True, logit_bias=GO_ON)
            for prompt in prompts()
        ]
        for stream in streams:
            next(stream)
        jobs = list(running.service.thread.jobs.values())
        assert [job.stage for job in jobs] == ["running"] * CLIENTS
        for stream in streams:
            stream.close()
        assert_idle_pools_hold_nothing(running)
