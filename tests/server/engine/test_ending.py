"""vLLM's fields that say which tokens end an answer: stop_token_ids, min_tokens, ignore_eos."""

from collections.abc import Iterator
from typing import Any

import pytest

from paged_kv.server.engine.rows import Rows
from tests.support.running_server import (
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    paged_server,
)
from tests.support.tiny_model import asked

PROMPT = [7, 8, 9]
# The end token of the model, and a bias that makes it the likeliest.
END = 0
ENDS = {str(END): 1000}


@pytest.fixture(
    scope="module",
    params=[[], pytest.param(["--draft-model", "ngram"], marks=pytest.mark.slow)],
    ids=["plain", "drafts"],
)
def server(tiny: str, request: pytest.FixtureRequest) -> Iterator[PagedRunningServer]:
    options = ["--model", tiny, "--max-kv-bytes", "64MB"]
    with paged_server(*options, *request.param) as started:
        yield started
        assert_idle_pools_hold_nothing(started)


@pytest.fixture(params=[False, True], ids=["batch", "alone"])
def running(
    server: PagedRunningServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> PagedRunningServer:
    if request.param:
        monkeypatch.setattr(Rows, "_is_alone", lambda *_: True)
    return server


def told(running: PagedRunningServer, **body: Any) -> Any:
    """A choice, and the ids of its tokens without the last one, if that ended it."""
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": True}
    status, said = asked(running, "/v1/completions", fields | body)
    assert status == 200, said
    (choice,) = said["choices"]
    tokens = [each["id"] for each in (choice["logprobs"] or {"content": []})["content"]]
    return choice, tokens, said["usage"]["completion_tokens"]


def test_an_end_token_that_is_ignored_ends_nothing_and_has_no_text(
    running: PagedRunningServer,
) -> None:
    choice, tokens, count = told(running, logit_bias=ENDS)
    assert (choice["text"], choice["finish_reason"], tokens, count) == ("", "stop", [], 1)
    choice, tokens, count = told(running, logit_bias=ENDS, ignore_eos=True)
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert (tokens, count) == ([END] * 12, 12)
    choice, _, count = told(running, logit_bias=ENDS, ignore_eos=True, stop_token_ids=[END])
    assert (choice["finish_reason"], count) == ("stop", 1)


def test_no_answer_ends_before_its_least_tokens(running: PagedRunningServer) -> None:
    for least in (1, 5):
        choice, tokens, count = told(running, logit_bias=ENDS, min_tokens=least)
        assert (choice["finish_reason"], count) == ("stop", least + 1)
        assert END not in tokens
    free, tokens, _ = told(running, ignore_eos=True)
    stop = {"stop_token_ids": tokens[:1], "ignore_eos": True}
    choice, others, _ = told(running, **stop, min_tokens=4)
    assert len(others) >= 4
    assert tokens[0] not in others
    assert free["finish_reason"] == "length"


def test_what_contradicts_itself_is_refused(server: PagedRunningServer) -> None:
    for body, param in (
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"ignore_eos": True, "structured_outputs": {"regex": "a"}}, "ignore_eos"),
        ({"stop_token_ids": [4096]}, "stop_token_ids"),
    ):
        status, said = asked(server, "/v1/completions", {"prompt": PROMPT, **body})
        assert (status, said["error"]["param"]) == (400, param)
    # All that fits into the context is enough.
    body = {"prompt": [7] * 4085, "min_tokens": 5, "max_tokens": -1, "ignore_eos": True}
    assert asked(server, "/v1/completions", body)[0] == 200
