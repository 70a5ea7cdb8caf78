"""The same request to a reproducible server gets the same answer, to the bit."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paged_kv.server.options import parsed_server_options
from paged_kv.server.server_command import require_servable
from tests.support.running_server import PagedRunningServer, paged_server
from tests.support.tiny_model import BLOCK, tokens_of

NAME = "default_model"
# Greedy, with a seed, without one, and with two choices.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 5},
    {"temperature": 1},
    {"temperature": 1, "seed": 8, "n": 2, "presence_penalty": 1.5},
]
# Two begin alike, and part within a page.
PROMPTS = [
    tokens_of(0, 470),
    tokens_of(0, 300) + tokens_of(2, 170),
    *map(tokens_of, (2, 3), (470, 259)),
]
REQUESTS = [
    {"prompt": prompt, "max_tokens": 60, "logit_bias": {"0": -1000}, "logprobs": 1, **kind}
    for prompt, kind in zip(PROMPTS, KINDS, strict=True)
]


def answer(running: PagedRunningServer, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The text of each choice, and the log-probabilities of its tokens."""
    completion: Any = running.client().completions.create(model=NAME, **body)
    return [(each.text, each.logprobs.token_logprobs) for each in completion.choices]


@pytest.mark.slow
def test_answers_are_the_same_alone_in_company_and_after_preemption(tiny: str) -> None:
    usual = ["--model", tiny, "--reproducible", "--prefill-step-size", "100"]
    with paged_server(*usual) as running:
        expected = [answer(running, body) for body in REQUESTS]
    with paged_server(*usual, "--max-kv-bytes", str(9 * BLOCK)) as running:
        running.hold_until_submitted(len(REQUESTS))
        with ThreadPoolExecutor(4) as clients:
            for _ in range(2):
                found = list(clients.map(lambda body: answer(running, body), REQUESTS))
                assert found == expected
        stats = running.pools[0].stats()
        assert min(stats.preemptions, stats.prefix_hits) > 0


def test_drafts_are_refused_at_the_start() -> None:
    words = ["--model", "x", "--reproducible", "--draft-model", "ngram"]
    with pytest.raises(ValueError, match="draft"):
        require_servable(parsed_server_options(words))
