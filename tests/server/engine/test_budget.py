"""Requests that take the budget to its last token are served, and get no token more."""

from typing import Any

import pytest

from tests.support.running_server import (
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    paged_server,
)
from tests.support.tiny_model import BLOCK, asked, tokens_of

TOKENS = 512
BUDGET = ["--max-kv-bytes", str(2 * BLOCK)]
DRAFTS = ["--draft-model", "ngram", "--num-draft-tokens", "5"]
PROMPT = tokens_of(0, TOKENS + 1)
# Prompts and max_tokens that take all of it, the longest prompt first.
EXACT = [(TOKENS, 0), (TOKENS - 1, 1), (480, 32)]


def tried(running: PagedRunningServer, tokens: int, max_tokens: int) -> Any:
    sent = {"prompt": PROMPT[:tokens], "max_tokens": max_tokens, "temperature": 0}
    status, said = asked(running, "/v1/completions", sent | {"logit_bias": {"0": -1000}})
    return status, said["error"] if "error" in said else said["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--admission", "optimistic", *DRAFTS], ["--admission", "reserve"]]
)
def test_the_budget_is_used_to_its_last_token(
    options: list[str], tiny: str, running: PagedRunningServer
) -> None:
    expected = [tried(running, *each) for each in EXACT]
    with paged_server("--model", tiny, *BUDGET, *options) as tight:
        for _ in range(2):
            assert [tried(tight, *each) for each in EXACT] == expected
            # What does not fit is not generated, and a prompt without room is refused.
            more = [tried(tight, tokens, most + 1) for tokens, most in EXACT[1:]]
            assert more == expected[1:]
            for tokens in (TOKENS, TOKENS + 1):
                status, error = tried(tight, tokens, 1)
                assert status == 400
                assert f"> {TOKENS - 1} maximum" in error["message"]
            # Without tokens to generate nothing is computed.
            assert tried(tight, TOKENS + 1, 0)[0] == 200
        assert_idle_pools_hold_nothing(tight)
    assert all(status == 200 for status, _ in expected)
