"""Requests of one prefix that come together compute it once, and count its pages once."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paged_kv.server.engine.batched_rows import BatchedRows
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
    wait_until,
)

NAME = "default_model"
LLAMA = ["--model", str(MODEL_FOLDERS["stdlib-llama"])]
# Never the token that ends a text.
GO_ON = {"0": -1000}
BLOCK = 256 * 6 * 2 * 2 * 64 * 4
SHARED = [(11 * i * i + 5 * i) % 500 + 1 for i in range(600)]
CLIENTS = 6


@pytest.fixture(scope="module", autouse=True)
def _float32() -> Iterator[None]:
    with in_float32():
        yield


def prompts() -> list[list[int]]:
    """All begin alike, and end differently."""
    return [[*SHARED, *range(100 + 10 * client, 105 + 10 * client)] for client in range(CLIENTS)]


def asked(running: PagedRunningServer, prompt: list[int], **body: Any) -> tuple[str, int]:
    """The text, and the number of cached tokens of the prompt."""
    answer = running.client().completions.create(
        model=NAME, prompt=prompt, max_tokens=8, temperature=0, logit_bias=GO_ON, **body
    )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, details.cached_tokens if details else 0


@pytest.mark.parametrize("step_size", ["2048", "128"])
def test_prompts_that_come_together_compute_what_they_share_once(step_size: str) -> None:
    options = [*LLAMA, "--max-kv-bytes", "64MB", "--prefill-step-size", step_size]
    with paged_server(*options) as running:
        expected = [asked(running, prompt)[0] for prompt in prompts()]
    with paged_server(*options) as running:
        running.hold_until_submitted(CLIENTS)
        with ThreadPoolExecutor(CLIENTS) as clients:
            answers = list(clients.map(lambda prompt: asked(running, prompt), prompts()))
        assert [text for text, _ in answers] == expected
        # One of them, whichever came first, has computed it.
        assert sorted(cached for _, cached in answers) == [0, *[len(SHARED)] * (CLIENTS - 1)]
        assert_idle_pools_hold_nothing(running)


@pytest.mark.parametrize(("salts", "waits"), [("ab", False), ("aa", True)])
def test_users_of_other_salts_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, salts: str, waits: bool
) -> None:
    """As they find nothing of each other."""
    steps, begun = [0], []

    def step(rows: BatchedRows) -> Any:
        steps[0] += 1
        return original_step(rows)

    def begin(rows: BatchedRows, *job: Any) -> None:
        begun.append(steps[0])
        original_begin(rows, *job)

    original_step, original_begin = BatchedRows.step, BatchedRows.begin
    monkeypatch.setattr(BatchedRows, "step", step)
    monkeypatch.setattr(BatchedRows, "begin", begin)
    with paged_server(*LLAMA, "--max-kv-bytes", "64MB", "--prefill-step-size", "128") as running:
        running.hold_until_submitted(2)
        with ThreadPoolExecutor(2) as clients:
            list(
                clients.map(
                    lambda salt: asked(running, prompts()[0], extra_body={"cache_salt": salt}),
                    salts,
                )
            )
    # A prompt takes 5 steps. One request begins in each.
    assert (begun[1] - begun[0] > 1) == waits


def test_no_prompt_waits_for_a_much_longer_one() -> None:
    """It has computed the common beginning itself long before the other's end."""
    long = [*SHARED, *[(7 * i * i + i) % 500 + 1 for i in range(1000)]]
    options = [*LLAMA, "--max-kv-bytes", "64MB", "--prefill-step-size", "128"]
    with paged_server(*options) as running:
        running.hold_until_submitted(2)
        mailbox = running.service.thread._mailbox
        wait_until(lambda: not mailbox._commands)  # the thread waits for both
        with ThreadPoolExecutor(2) as clients:
            first = clients.submit(asked, running, long)
            wait_until(lambda: len(mailbox._commands) == 1)
            second = clients.submit(asked, running, prompts()[0])
        assert (first.result()[1], second.result()[1]) == (0, 0)


def test_shared_pages_count_once_for_all_that_begin() -> None:
    """Alone each takes 3 of the 9 blocks to begin, and behind a running one 1."""
    with paged_server(*LLAMA, "--max-kv-bytes", str(9 * BLOCK)) as running:
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
