"""A server with drafts answers what it answers without, and still batches its requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paged_kv.integrations.speculation import generator
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.server.engine.batched_rows import BatchedRows
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.options import server_parser
from tests.support.folders import MODEL_FOLDERS
from tests.support.heads import folder_of_head
from tests.support.running_server import (
    FEW_LIKELY,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
)

LLAMA = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--prefill-step-size", "256"]
LARGE = ["--max-kv-bytes", "64MB"]
NGRAM = ["--draft-model", "ngram", "--num-draft-tokens", "5"]
MODEL = ["--draft-model", str(MODEL_FOLDERS["stdlib-gemma3"])]
TEXT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n" * 3


@pytest.fixture(scope="module", autouse=True)
def _fixed() -> Iterator[None]:
    """Drafts whatever the times of steps are, in float32."""
    with in_float32(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(generator, "AdaptiveLengths", FixedLengths)
        yield


def requests(max_tokens: int = 24) -> list[dict[str, Any]]:
    """Greedy, a stop text, a seed, penalties with logprobs, and two choices."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "stop": ["append("]},
        {"temperature": 1, "seed": 5, "extra_body": FEW_LIKELY},
        {"temperature": 0, "presence_penalty": 1.5, "logprobs": 1},
        {"temperature": 1, "seed": 8, "n": 2, "extra_body": FEW_LIKELY},
    ]
    return [
        {"prompt": f"# {number}\n{TEXT}class", "max_tokens": max_tokens, **kind}
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
def expected() -> list[Any]:
    with paged_server(*LLAMA, *LARGE) as running:
        return answers(running, requests())


def test_answers_with_a_head_are_those_without_drafts(
    expected: list[Any], trained: Any, tmp_path: Path
) -> None:
    head = folder_of_head(trained("stdlib-llama")[0], tmp_path)
    with paged_server(*LLAMA, *LARGE, "--draft-model", head) as running:
        assert answers(running, requests()) == expected
        assert running.pools[0].stats().draft_tokens > 100
        assert_idle_pools_hold_nothing(running)


@pytest.mark.parametrize("draft", [NGRAM, pytest.param(MODEL, marks=pytest.mark.slow)])
def test_answers_of_a_batch_are_those_without_drafts(draft: list[str], expected: list[Any]) -> None:
    with paged_server(*LLAMA, *LARGE, *draft) as running:
        assert answers(running, requests()) == expected
        stats = running.pools[0].stats()
        assert 0 < stats.accepted_tokens < stats.draft_tokens
        assert sum(pool.budget.max_bytes for pool in running.pools) <= 64_000_000
        assert_idle_pools_hold_nothing(running)


def test_usage_tells_of_drafts_and_a_request_may_forgo_them() -> None:
    body = requests()[0]
    with paged_server(*LLAMA, *LARGE, *NGRAM) as running:
        create = running.client().completions.create
        with_drafts = create(model="default_model", **body)
        without = create(model="default_model", extra_body={"num_draft_tokens": 0}, **body)
        stats = running.pools[0].stats()
    assert with_drafts.choices == without.choices
    assert with_drafts.usage is not None
    assert without.usage is not None
    assert without.usage.completion_tokens_details is None
    details = with_drafts.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == stats.accepted_tokens > 0
    rejected = stats.draft_tokens - stats.accepted_tokens
    assert details.rejected_prediction_tokens == rejected


def test_look_up_learns_from_requests_of_the_same_salt_if_allowed() -> None:
    body: dict[str, Any] = {
        "prompt": "import os\n\n\ndef remove(path):",
        "temperature": 0,
        "max_tokens": 24,
    }
    accepted = []
    with paged_server(*LLAMA, *LARGE, *NGRAM, "--draft-shared-tokens", "1000") as running:
        for salt in ("alice", "bob", "alice"):
            before = running.pools[0].stats().accepted_tokens
            running.client().completions.create(
                model="default_model", extra_body={"cache_salt": salt}, **body
            )
            accepted.append(running.pools[0].stats().accepted_tokens - before)
    assert accepted[0] == accepted[1] < accepted[2]


@pytest.mark.slow
def test_preempted_requests_draft_again() -> None:
    bodies = [
        {**body, "prompt": 6 * body["prompt"], "logit_bias": {"0": -1000}, "max_tokens": 240}
        for body in requests()
    ]
    with paged_server(*LLAMA, "--max-kv-bytes", "128MB") as running:
        stock = answers(running, bodies)
    # Each of the six texts, but the one with a stop text, becomes 3 blocks; they share none.
    budget = str(8 * 256 * 6 * 2 * 2 * 64 * 4)
    with paged_server(*LLAMA, *NGRAM, "--max-kv-bytes", budget) as running:
        assert answers(running, bodies) == stock
        stats = running.pools[0].stats()
        assert stats.preemptions > 0
        assert stats.accepted_tokens > 0
        assert_idle_pools_hold_nothing(running)


def test_clients_that_leave_while_tokens_are_drafted_leave_nothing_behind() -> None:
    with paged_server(*LLAMA, *LARGE, *NGRAM) as running:
        stream = running.client().completions.create(
            model="default_model", prompt=TEXT, max_tokens=2000, stream=True, temperature=0
        )
        for _ in range(4):
            next(stream)
        stream.close()
        assert_idle_pools_hold_nothing(running)


def test_a_choice_that_is_dropped_between_two_tokens_of_a_step_gets_no_more() -> None:
    class Response:
        uid = 7

    rows = BatchedRows.__new__(BatchedRows)
    rows._rows = {}
    assert list(rows._note_sampled(Response())) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--draft-model", "ngram", "--kv-bits", "8"],
            "--draft-model does not work with --kv-bits",
        ),
        (["--draft-model", "VOCABULARY"], "has a vocabulary of 7 tokens, and the model one of"),
    ],
)
def test_drafts_that_cannot_work_are_refused_when_the_model_is_loaded(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        vocab_size = 7

    drafts = "paged_kv.integrations.speculation.draft_models"
    monkeypatch.setattr(f"{drafts}.load", lambda name, **_: (None, Other()))
    monkeypatch.setattr(f"{drafts}.snapshot_download", lambda name, **_: "a folder of no head")
    provider = PagedModelProvider(server_parser().parse_args([*LLAMA, *LARGE, *options]))
    with pytest.raises(ValueError, match=message):
        provider.load_default()  # type: ignore[no-untyped-call]  # mlx-lm's
    assert provider.loaded is None
    assert not provider.factories
