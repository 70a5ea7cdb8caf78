"""A server reads a prompt's pages from other servers before it begins, and generates meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paged_kv.integrations.speculation.draft_lengths import AdaptiveLengths, FixedLengths
from paged_kv.integrations.speculation.drafts import DraftRow
from paged_kv.integrations.speculation.model_draft import ModelDraft
from paged_kv.store.tier import Tier
from tests.support.running_server import PagedRunningServer, paged_server, wait_until
from tests.support.tier_servers import SECRET, redis_server
from tests.support.tiny_model import completion, tiny_folder, tokens_of

TOKENS = tokens_of(0, 1100)


@pytest.fixture
def servers(
    tiny: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[PagedRunningServer, PagedRunningServer]]:
    """Two servers that share a tier; with a parameter they draft with another model."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    with ExitStack() as stack:
        tier = stack.enter_context(redis_server(tmp_path)).address
        options = ["--model", tiny, "--max-tokens", "4"]
        if getattr(request, "param", False):
            other = tiny_folder(tmp_path / "other", seed=1)
            options += ["--draft-model", other, "--num-draft-tokens", "2"]
        options += ["--max-kv-bytes", "64MB", "--store-after", "1"]
        options += ["--store", tier, "--store-secret", str(secret)]
        yield (
            stack.enter_context(paged_server(*options)),
            stack.enter_context(paged_server(*options)),
        )


def store_of(server: PagedRunningServer) -> Any:
    return server.service.thread.provider.factories[0].store


def let_tiers_wait(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Events: a server was asked for pages, which is noted, and may answer, which is to be set."""
    is_asked, may_answer = threading.Event(), threading.Event()
    asked = Tier.ask

    def slow(tier: Tier, *wanted: Any) -> Any:
        is_asked.set()
        assert may_answer.wait(60)
        return asked(tier, *wanted)

    monkeypatch.setattr(Tier, "ask", slow)
    return is_asked, may_answer


@pytest.mark.slow
def test_others_are_generated_while_a_prompt_is_fetched(
    servers: tuple[PagedRunningServer, PagedRunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    expected, _ = completion(first, TOKENS)
    assert store_of(first).flush()
    is_asked, may_answer = let_tiers_wait(monkeypatch)
    told: list[str] = []
    asking = threading.Thread(target=lambda: told.append(completion(second, TOKENS)[0]))
    asking.start()
    assert is_asked.wait(60)
    # A short prompt needs no page of a server, and is answered while the other one waits.
    completion(second, TOKENS[:20])
    assert not told
    may_answer.set()
    asking.join()
    assert told == [expected]
    assert second.service.metrics.cached_tokens == 1024
    store = store_of(second)
    wait_until(lambda: not store.prefetched.ask(None, None))


@pytest.mark.slow
def test_nothing_spins_while_the_only_prompt_is_fetched(
    servers: tuple[PagedRunningServer, PagedRunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = servers
    is_asked, may_answer = let_tiers_wait(monkeypatch)
    mailbox = second.service.thread._mailbox
    is_waiting: list[bool] = []
    take = mailbox.take

    def noted(*, wait: bool, seconds: float | None = None) -> list[Any]:
        is_waiting.append(wait)
        return take(wait=wait, seconds=seconds)

    monkeypatch.setattr(mailbox, "take", noted)
    asking = threading.Thread(target=completion, args=(second, TOKENS))
    asking.start()
    assert is_asked.wait(60)
    wait_until(lambda: is_waiting)
    mailbox.put(lambda thread: None)
    wait_until(lambda: len(is_waiting) >= 2)
    assert all(is_waiting)
    may_answer.set()
    asking.join()


@pytest.mark.slow
@pytest.mark.parametrize("servers", [True], indirect=True)
def test_generation_does_not_wait_for_pages_of_the_draft_model(
    servers: tuple[PagedRunningServer, PagedRunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    # In every step, whether it pays or not.
    monkeypatch.setattr(AdaptiveLengths, "choose", FixedLengths.choose)
    expected, _ = completion(first, TOKENS)
    for each in first.service.thread.provider.factories:
        assert each.store is not None
        assert each.store.flush()
    provider = second.service.thread.provider
    drafting = provider.factories[1]
    store: Any = drafting.store
    (tier,) = store.servers
    may_answer = threading.Event()
    asked = tier.ask
    monkeypatch.setattr(tier, "ask", lambda *wanted: may_answer.wait(60) and asked(*wanted))
    assert completion(second, TOKENS)[0] == expected
    assert drafting.stats().store_hits == {"redis": 0}
    may_answer.set()
    drafting.clear()
    # They are used by who drafts after they have landed.
    prepare, fetcher = ModelDraft.prepare, provider.fetchers[1]

    def later(draft: ModelDraft, rows: list[DraftRow]) -> None:
        wait_until(lambda: any(each.seconds for each in fetcher._fetches.values()))
        prepare(draft, rows)

    monkeypatch.setattr(ModelDraft, "prepare", later)
    assert completion(second, TOKENS)[0] == expected
    assert drafting.stats().store_hits == {"redis": 1024}
    wait_until(lambda: not store.prefetched.ask(None, None))
