"""Requests that take the budget to its last token are served, and get no token more."""

import json
from typing import Any

import pytest

from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
)
from tests.support.server_process import post

# Two blocks of stdlib-llama in float32.
TOKENS = 512
BUDGET = ["--max-kv-bytes", str(TOKENS * 6 * 2 * 2 * 64 * 4)]
LLAMA = ["--model", str(MODEL_FOLDERS["stdlib-llama"])]
DRAFTS: list[list[str]] = [[], ["--draft-model", "ngram", "--num-draft-tokens", "5"]]
PROMPT = [(11 * i * i + 5 * i) % 500 + 1 for i in range(TOKENS + 1)]
# Prompts and max_tokens that take all of it, the longest prompt first.
EXACT = [(TOKENS, 0), (TOKENS - 1, 1), (480, 32), (250, 262)]


def asked(running: PagedRunningServer, tokens: int, max_tokens: int, **body: Any) -> Any:
    answer = post(
        running.port,
        prompt=PROMPT[:tokens],
        max_tokens=max_tokens,
        temperature=0,
        logit_bias={"0": -1000},
        **body,
    )
    said = json.loads(answer.read())
    return answer.status, said["error"] if "error" in said else said["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("admission", ["optimistic", "reserve"])
def test_the_budget_is_used_to_its_last_token(admission: str, drafts: list[str]) -> None:
    with in_float32():
        with paged_server(*LLAMA, "--max-kv-bytes", "64MB") as running:
            expected = [asked(running, *each) for each in EXACT]
        with paged_server(*LLAMA, *BUDGET, *drafts, "--admission", admission) as running:
            for _ in range(2):
                assert [asked(running, *each) for each in EXACT] == expected
                # What does not fit is not generated, and a prompt without room is refused.
                assert [asked(running, tokens, most + 1) for tokens, most in EXACT[1:]] == expected[
                    1:
                ]
                for tokens in (TOKENS, TOKENS + 1):
                    status, error = asked(running, tokens, 1)
                    assert status == 400
                    assert f"at most {TOKENS} fit" in error["message"]
                # Without tokens to generate nothing is computed.
                assert asked(running, TOKENS + 1, 0)[0] == 200
            assert_idle_pools_hold_nothing(running)
    assert all(status == 200 for status, _ in expected)
