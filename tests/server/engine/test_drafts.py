"""A server with drafts answers what it answers without, and still batches its requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from paged_kv.integrations.speculation import generator
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.engine.rows import Rows
from paged_kv.server.options import parsed_server_options
from tests.support.heads import folder_of_head
from tests.support.running_server import (
    FEW_LIKELY,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    paged_server,
)
from tests.support.tiny_model import tiny_folder

LARGE = ["--prefill-step-size", "256", "--max-kv-bytes", "64MB"]
NGRAM = ["--draft-model", "ngram", "--num-draft-tokens", "5"]
# Answers are made of a, b and c, so that most of what comes was there before.
FEW = {"65": 100, "66": 100, "67": 100}
TEXT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n" * 3


@pytest.fixture(scope="module", autouse=True)
def _fixed() -> Iterator[None]:
    """Drafts whatever the times of steps are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(generator, "DraftLengths", FixedLengths)
        yield


def requests() -> list[dict[str, Any]]:
    """Greedy, a stop text, a seed, penalties with logprobs, and two choices."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "stop": ["ac"]},
        {"temperature": 1, "seed": 5, "extra_body": FEW_LIKELY},
        {"temperature": 0, "presence_penalty": 1.5, "logprobs": 1},
        {"temperature": 1, "seed": 8, "n": 2, "extra_body": FEW_LIKELY},
    ]
    return [
        {"prompt": f"# {number}\n{TEXT}class", "max_tokens": 24, "logit_bias": FEW, **kind}
        for number, kind in enumerate(kinds)
    ]


def answer(running: PagedRunningServer, body: dict[str, Any]) -> list[Any]:
    found = running.client().completions.create(model="default_model", **body)
    return [
        (each.text, each.finish_reason, [] if each.logprobs is None else each.logprobs.tokens)
        for each in found.choices
    ]


def answers(running: PagedRunningServer, bodies: list[dict[str, Any]]) -> list[Any]:
    """Of all requests at once, begun in one step."""
    running.hold_until_submitted(len(bodies))
    with ThreadPoolExecutor(len(bodies)) as clients:
        return list(clients.map(lambda body: answer(running, body), bodies))


@pytest.fixture(scope="module")
def expected(tiny: str) -> list[Any]:
    with paged_server("--model", tiny, *LARGE) as running:
        return answers(running, requests())


@pytest.mark.parametrize(
    "kind",
    [
        "ngram",
        pytest.param("head", marks=pytest.mark.slow),
        pytest.param("model", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_answers_of_a_batch_are_those_without_drafts(
    kind: str, tiny: str, expected: list[Any], tmp_path: Path
) -> None:
    draft = NGRAM
    if kind == "head":
        draft = ["--draft-model", folder_of_head(mlx_lm.load(tiny)[0], tmp_path)]
    if kind == "model":
        draft = ["--draft-model", tiny_folder(tmp_path / "draft", num_hidden_layers=1)]
    with paged_server("--model", tiny, *LARGE, *draft) as running:
        assert answers(running, requests()) == expected
        stats = running.pools[0].stats()
        assert stats.draft_tokens > 20
        assert (0 < stats.accepted_tokens < stats.draft_tokens) or kind != "ngram"
        assert sum(pool.budget.max_bytes for pool in running.pools) <= 64_000_000
        assert_idle_pools_hold_nothing(running)


def test_usage_tells_of_drafts_and_a_request_may_forgo_them(tiny: str) -> None:
    body = requests()[0]
    with paged_server("--model", tiny, *LARGE, *NGRAM) as running:
        create = running.client().completions.create
        with_drafts = create(model="default_model", **body)
        without = create(model="default_model", extra_body={"num_draft_tokens": 0}, **body)
        stats = running.pools[0].stats()
    assert with_drafts.choices == without.choices
    assert with_drafts.usage
    assert without.usage
    assert without.usage.completion_tokens_details is None
    details = with_drafts.usage.completion_tokens_details
    assert details
    assert details.accepted_prediction_tokens == stats.accepted_tokens > 0
    rejected = stats.draft_tokens - stats.accepted_tokens
    assert details.rejected_prediction_tokens == rejected


@pytest.mark.slow
def test_look_up_learns_from_requests_of_the_same_salt_if_allowed(tiny: str) -> None:
    body: dict[str, Any] = {"prompt": "def remove(path):", "temperature": 0, "max_tokens": 24}
    accepted = []
    with paged_server("--model", tiny, *LARGE, *NGRAM, "--draft-shared-tokens", "1000") as running:
        for salt in ("alice", "bob", "alice"):
            before = running.pools[0].stats().accepted_tokens
            running.client().completions.create(
                model="default_model", extra_body={"cache_salt": salt}, **body
            )
            accepted.append(running.pools[0].stats().accepted_tokens - before)
    assert accepted[0] == accepted[1] < accepted[2]


def test_a_choice_that_is_dropped_between_two_tokens_of_a_step_gets_no_more() -> None:
    class Response:
        uid = 7

    rows = Rows.__new__(Rows)
    rows._rows = {}
    assert list(rows._note_sampled(Response())) == []


def test_a_draft_of_another_vocabulary_is_refused_when_the_model_is_loaded(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        vocab_size = 7

    drafts = "paged_kv.integrations.speculation.draft_models"
    monkeypatch.setattr(f"{drafts}.load", lambda name, **_: (None, Other()))
    monkeypatch.setattr(f"{drafts}.downloaded", lambda *_: Path("no head"))
    options = ["--model", tiny, *LARGE, "--draft-model", "VOCABULARY"]
    provider = PagedModelProvider(parsed_server_options(options))
    with pytest.raises(ValueError, match="vocabulary of 7"):
        provider.load_default()  # type: ignore[no-untyped-call]  # mlx-lm's
    assert provider.loaded is None
    assert not provider.factories
