"""A server that is short of memory computes in smaller parts, and refuses single requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import InternalServerError

from paged_kv.server.engine.generation_thread import MOST_FAILED_STEPS
from tests.support.running_server import PagedRunningServer, paged_server, wait_until
from tests.support.short_of_memory import fail_where
from tests.support.tiny_model import completion, tokens_of

PROMPTS = [tokens_of(number, 245) for number in range(3)]
REFUSAL = "the server has no memory to compute this"
POISON = 700
POISONED = [*PROMPTS[0][:100], POISON, *PROMPTS[0][101:]]


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[PagedRunningServer]:
    options = ["--prefill-step-size", "256", "--max-kv-bytes", "64MB"]
    with paged_server("--model", tiny, *options) as started:
        yield started


def refused(running: PagedRunningServer, prompt: list[int], **options: Any) -> str:
    with pytest.raises(InternalServerError) as raised:
        completion(running, prompt, **options)
    assert raised.value.status_code == 503
    return str(raised.value)


@pytest.mark.slow
def test_only_the_request_without_memory_is_refused(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [completion(running, prompt)[0] for prompt in PROMPTS]
    running.pools[0].clear()
    fail_where(lambda tokens: POISON in tokens, monkeypatch)
    with ThreadPoolExecutor() as threads:
        running.hold_until_submitted(5)
        others = [threads.submit(completion, running, prompt) for prompt in PROMPTS]
        ends = [threads.submit(refused, running, POISONED, n=count) for count in (1, 2)]
        assert [each.result()[0] for each in others] == expected
        for each in ends:
            assert REFUSAL in each.result()
    wait_until(lambda: running.pools[0].stats().bytes_active == 0)


@pytest.mark.slow
def test_shortages_end_no_server_and_steps_become_smaller(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"extra_body": {"prompt_logprobs": 1}}
    expected, _ = completion(running, PROMPTS[1], **options)
    fail_where(lambda tokens: POISON in tokens, monkeypatch)
    for _ in range(MOST_FAILED_STEPS + 1):
        assert REFUSAL in refused(running, POISONED, **options)
    assert completion(running, PROMPTS[1], **options)[0] == expected
    running.wait_until_idle()
    running.pools[0].clear()
    fail_where(lambda tokens: len(tokens) > 70, monkeypatch)
    assert completion(running, PROMPTS[1], **options)[0] == expected
