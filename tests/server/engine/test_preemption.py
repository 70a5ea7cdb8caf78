"""Requests that are preempted over HTTP get the texts that they would have got."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from paged_kv.server.engine.generation_thread import GenerationThread
from paged_kv.server.engine.jobs import Job
from paged_kv.server.engine.rows import Rows
from tests.support.patience import PATIENCE_S
from tests.support.running_server import FEW_LIKELY, PagedRunningServer, paged_server, wait_until
from tests.support.tiny_model import BLOCK, tokens_of

NAME = "default_model"
# Never the token that ends a text.
GO_ON = {"0": -1000}
# Who runs beside whom does not depend on how quick this machine is.
STEP = ["--prefill-step-size", "256", "--decode-share", "0"]
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


@pytest.mark.slow
def test_a_request_of_a_better_priority_takes_the_place_of_others(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They continue with the tokens that they would have got."""
    low = [{**body, "max_tokens": 160} for body in requests()]
    for body in low:
        body["extra_body"] = {**body.get("extra_body", {}), "priority": 5}
    high = {**requests()[0], "max_tokens": 20, "prompt": tokens_of(9, 470)}
    found, ended, step, leave = [], list[int](), Rows.step, GenerationThread._leave

    def note_end(thread: GenerationThread, job: Job) -> None:
        ended.append(job.priority)
        leave(thread, job)

    monkeypatch.setattr(GenerationThread, "_leave", note_end)
    for size in (LARGE, SMALL):
        with paged_server("--model", tiny, *size) as running, ThreadPoolExecutor(5) as clients:
            thread, held = running.service.thread, Event()

            def hold(rows: Rows, thread: Any = thread, held: Event = held) -> Any:
                """Once all generate, wait for the other request, however slow its client is."""
                generating = [job for job in thread.jobs.values() if job.generated_tokens]
                if len(generating) == len(low) and not held.is_set():
                    held.set()
                    wait_until(lambda: not thread._commands.empty())
                return step(rows)

            monkeypatch.setattr(Rows, "step", hold)
            running.hold_until_submitted(len(low))
            ended.clear()
            asked = [clients.submit(texts, running, body) for body in low]
            assert held.wait(PATIENCE_S)
            found.append([texts(running, high), *(each.result() for each in asked)])
            stats = running.pools[0].stats()
    assert ended == [0, *[5] * len(low)]
    assert stats.preemptions > 0
    assert found[0] == found[1]
