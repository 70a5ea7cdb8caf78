"""A server that is short of memory computes in smaller parts, and refuses single requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import InternalServerError

from paged_kv.server.engine.generation_thread import MOST_FAILED_STEPS
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import PagedRunningServer, in_float32, paged_server, wait_until
from tests.support.short_of_memory import fail_where

OPTIONS = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--prefill-step-size", "256"]
PROMPTS = [[(11 * i * i + 5 * i + k) % 500 + 1 for i in range(245)] for k in range(3)]
REFUSAL = "the server has no memory to compute this"
POISON = 700
POISONED = [*PROMPTS[0][:100], POISON, *PROMPTS[0][101:]]


@pytest.fixture(scope="module", autouse=True)
def _float32() -> Iterator[None]:
    with in_float32():
        yield


def completion(running: PagedRunningServer, prompt: list[int], **options: Any) -> Any:
    options = {"max_tokens": 20, "temperature": 0, "logit_bias": {"0": -1000}, **options}
    choices = running.client().completions.create(model="default_model", prompt=prompt, **options)
    return [choice.to_dict() for choice in choices.choices]


def refused(running: PagedRunningServer, prompt: list[int], **options: Any) -> str:
    with pytest.raises(InternalServerError) as raised:
        completion(running, prompt, **options)
    assert raised.value.status_code == 503
    return str(raised.value)


def test_only_the_request_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with paged_server(*OPTIONS) as running:
        expected = [completion(running, prompt) for prompt in PROMPTS]
        running.pools[0].clear()
        fail_where(lambda tokens: POISON in tokens, monkeypatch)
        with ThreadPoolExecutor() as threads:
            running.hold_until_submitted(5)
            others = [threads.submit(completion, running, prompt) for prompt in PROMPTS]
            ends = [threads.submit(refused, running, POISONED, n=count) for count in (1, 2)]
            assert [each.result() for each in others] == expected
            for each in ends:
                assert REFUSAL in each.result()
        wait_until(lambda: running.pools[0].stats().bytes_active == 0)


@pytest.mark.parametrize("options", [{}, {"extra_body": {"prompt_logprobs": 1}}])
def test_shortages_do_not_end_the_server(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with paged_server(*OPTIONS) as running:
        expected = completion(running, PROMPTS[1], **options)
        fail_where(lambda tokens: POISON in tokens, monkeypatch)
        for _ in range(MOST_FAILED_STEPS + 1):
            assert REFUSAL in refused(running, POISONED, **options)
        assert completion(running, PROMPTS[1], **options) == expected


@pytest.mark.parametrize("options", [{}, {"extra_body": {"prompt_logprobs": 1}}])
def test_prompts_are_computed_in_steps_that_there_is_memory_for(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with paged_server(*OPTIONS) as running:
        expected = completion(running, PROMPTS[0], **options)
        running.pools[0].clear()
        fail_where(lambda tokens: len(tokens) > 70, monkeypatch)
        assert completion(running, PROMPTS[0], **options) == expected
