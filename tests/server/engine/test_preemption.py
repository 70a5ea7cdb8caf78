"""Requests that are preempted over HTTP get the texts that they would have got."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.running_server import (
    FEW_LIKELY,
    PagedRunningServer,
    paged_server,
    wait_until,
)
from tests.support.tiny_model import BLOCK, tokens_of

NAME = "default_model"
# Never the token that ends a text.
GO_ON = {"0": -1000}
STEP = ["--prefill-step-size", "256"]
# Each of the 5 texts needs 3 blocks, and 2 of them to begin.
SMALL = [*STEP, "--max-kv-bytes", str(10 * BLOCK)]
LARGE = [*STEP, "--max-kv-bytes", "128MB"]


def requests() -> list[dict[str, Any]]:
    """Greedy, with a seed, with penalties, and with two choices; a stream of each."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 5, "extra_body": FEW_LIKELY},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 1, "seed": 8, "n": 2, "extra_body": FEW_LIKELY},
    ]
    prompts = [tokens_of(number, 470) for number in range(4)]
    return [
        {"prompt": prompt, "max_tokens": 60, "logit_bias": GO_ON, "logprobs": 1, **kind}
        for prompt, kind in zip(prompts, kinds, strict=True)
    ]


def texts(running: PagedRunningServer, body: dict[str, Any]) -> dict[int, str]:
    """The streamed text of each choice."""
    parts: dict[int, str] = {}
    for chunk in running.client().completions.create(model=NAME, stream=True, **body):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
    return parts


def served(model: str, *options: str) -> tuple[list[dict[int, str]], Any]:
    """All requests at once, begun in one step, and the statistics of the pool."""
    with paged_server("--model", model, *options) as running:
        running.hold_until_submitted(len(requests()))
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda body: texts(running, body), requests()))
        stats = running.pools[0].stats()
        running.wait_until_idle()
        assert running.pools[0].stats().blocks_used == 0
    return answers, stats


@pytest.mark.slow
def test_streams_of_preempted_requests_are_what_they_would_have_been(tiny: str) -> None:
    expected, plenty = served(tiny, *LARGE)
    assert plenty.preemptions == 0
    found, stats = served(tiny, *SMALL, "--admission", "optimistic")
    assert stats.preemptions > 0
    assert found == expected


def with_priority(body: dict[str, Any], priority: int) -> dict[str, Any]:
    return {**body, "extra_body": {**body.get("extra_body", {}), "priority": priority}}


@pytest.mark.slow
def test_a_request_of_a_better_priority_takes_the_place_of_others(tiny: str) -> None:
    """They continue with the tokens that they would have got."""
    low = [with_priority({**body, "max_tokens": 160}, 5) for body in requests()]
    high = {**requests()[0], "max_tokens": 20, "prompt": tokens_of(9, 470)}
    found, ended = [], []
    for size in (LARGE, SMALL):
        with paged_server("--model", tiny, *size) as running, ThreadPoolExecutor(5) as clients:
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
