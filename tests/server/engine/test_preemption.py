"""Requests that are preempted over HTTP get the texts that they would have got."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    FEW_LIKELY,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
    wait_until,
)

NAME = "default_model"
LLAMA = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--prefill-step-size", "256"]
# Never the token that ends a text.
GO_ON = {"0": -1000}
# 10 blocks: each of the 5 texts needs 3, and 2 of them to begin.
SMALL = ["--max-kv-bytes", str(10 * 256 * 6 * 2 * 2 * 64 * 4)]
LARGE = ["--max-kv-bytes", "128MB"]


@pytest.fixture(scope="module", autouse=True)
def _float32() -> Iterator[None]:
    with in_float32():
        yield


def requests() -> list[dict[str, Any]]:
    """Greedy, with a seed, with penalties, and with two choices; a stream of each."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 5, "extra_body": FEW_LIKELY},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 1, "seed": 8, "n": 2, "extra_body": FEW_LIKELY},
    ]
    prompts = [[(11 * i * i + 5 * i + k) % 500 + 1 for i in range(245)] for k in range(4)]
    return [
        {"prompt": prompt, "max_tokens": 280, "logit_bias": GO_ON, "logprobs": 1, **kind}
        for prompt, kind in zip(prompts, kinds, strict=True)
    ]


def texts(running: PagedRunningServer, body: dict[str, Any]) -> dict[int, str]:
    """The streamed text of each choice."""
    parts: dict[int, str] = {}
    for chunk in running.client().completions.create(model=NAME, stream=True, **body):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
    return parts


def served(*options: str) -> tuple[list[dict[int, str]], Any]:
    """All requests at once, begun in one step, and the statistics of the pool."""
    with paged_server(*LLAMA, *options) as running:
        running.hold_until_submitted(len(requests()))
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda body: texts(running, body), requests()))
        stats = running.pools[0].stats()
        running.wait_until_idle()
        assert running.pools[0].stats().blocks_used == 0
    return answers, stats


@pytest.mark.slow
def test_streams_of_preempted_requests_are_what_they_would_have_been() -> None:
    expected, plenty = served(*LARGE)
    assert plenty.preemptions == 0
    found, stats = served(*SMALL, "--admission", "optimistic")
    assert stats.preemptions > 0
    assert found == expected
    found, stats = served(*SMALL, "--admission", "reserve")
    assert stats.preemptions == 0
    assert found == expected


def test_more_requests_begin_than_may_all_reach_max_tokens() -> None:
    """Each may become 7 of the 12 blocks, and takes 2 to begin."""
    budget = str(12 * 256 * 6 * 2 * 2 * 64 * 4)
    with paged_server(*LLAMA, "--max-kv-bytes", budget) as running:
        create = running.client().completions.create
        streams = [
            create(model=NAME, prompt=[3 + k] * 9, max_tokens=1700, stream=True, logit_bias=GO_ON)
            for k in range(3)
        ]
        for stream in streams:
            next(stream)
        jobs = list(running.service.thread.jobs.values())
        assert [job.stage for job in jobs] == ["running"] * 3
        for stream in streams:
            stream.close()
        assert_idle_pools_hold_nothing(running)


def with_priority(body: dict[str, Any], priority: int) -> dict[str, Any]:
    return {**body, "extra_body": {**body.get("extra_body", {}), "priority": priority}}


@pytest.mark.slow
def test_a_request_of_a_better_priority_takes_the_place_of_others() -> None:
    """They continue with the tokens that they would have got."""
    low = [with_priority(body, 5) for body in requests()]
    high = {**requests()[0], "max_tokens": 20}
    high["prompt"] = [token % 400 + 50 for token in high["prompt"]]
    found, ended = [], []
    for size in (LARGE, SMALL):
        with paged_server(*LLAMA, *size) as running, ThreadPoolExecutor(5) as clients:
            running.hold_until_submitted(len(low))

            def ask(body: dict[str, Any], number: int, running: Any = running) -> dict[int, str]:
                try:
                    return texts(running, body)
                finally:
                    ended.append(number)

            asked = [clients.submit(ask, body, at) for at, body in enumerate(low)]
            jobs = running.service.thread.jobs
            wait_until(lambda jobs=jobs: sum(j.generated_tokens > 0 for j in [*jobs.values()]) == 4)
            ended.clear()
            first = ask(high, -1)
            found.append([first, *(each.result() for each in asked)])
            stats = running.pools[0].stats()
    assert ended[0] == -1
    assert stats.preemptions > 0
    assert found[0] == found[1]
