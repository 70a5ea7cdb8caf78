"""A server reads a prompt's pages from other servers before it begins, and generates meanwhile. One
that lets another compute long prompts writes the texts that it would have written, whatever happens
to either.
"""

import json
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from openai import OpenAI

from paged_kv.integrations.speculation.draft_lengths import DraftLengths, FixedLengths
from paged_kv.integrations.speculation.drafts import DraftRow, ModelDraft
from paged_kv.server.engine.prompt_fetcher import OtherServer, PrefillRequest
from paged_kv.store.tier import Tier
from tests.support.ports import free_port
from tests.support.running_server import PagedRunningServer, paged_server, wait_until
from tests.support.server_process import metrics, post, server_process
from tests.support.tier_servers import SECRET, RedisServer, redis_server
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
    thread = second.service.thread
    is_waiting: list[bool] = []
    taken = thread._taken

    def noted(wait_s: float) -> list[Any]:
        is_waiting.append(wait_s > 0)
        return taken(wait_s)

    monkeypatch.setattr(thread, "_taken", noted)
    asking = threading.Thread(target=completion, args=(second, TOKENS))
    asking.start()
    assert is_asked.wait(60)
    wait_until(lambda: is_waiting)
    thread._commands.put(lambda thread: None)
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
    monkeypatch.setattr(DraftLengths, "choose", FixedLengths.choose)
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


PAGE = 256
LARGE = ("--max-kv-bytes", "64MB", "--max-tokens", "8")


def prompt(seed: int, length: int = 1500) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(1, 500) for _ in range(length)]


def text_of(port: int, tokens: list[int], **body: Any) -> str:
    answer = post(port, prompt=tokens, **body)
    content = json.loads(answer.read())
    assert answer.status == 200, content
    return str(content["choices"][0]["text"])


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_bytes(SECRET)
    return file


@pytest.fixture(scope="module")
def tier(redis: RedisServer, secret: Path) -> list[str]:
    return ["--store", redis.address, "--store-secret", str(secret)]


def handing(port: int) -> list[str]:
    return ["--prefill-from", f"http://127.0.0.1:{port}", "--prefill-over", "500"]


@contextmanager
def pair(model: str, tier: list[str]) -> Iterator[tuple[int, int]]:
    """The ports of a server that computes prompts, and of one that hands them over."""
    options = ["--model", model, *LARGE, *tier]
    with (
        paged_server(*options) as other,
        paged_server(*options, *handing(other.port)) as this,
    ):
        yield other.port, this.port


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[PagedRunningServer]:
    with paged_server("--model", tiny, *LARGE) as started:
        yield started


@pytest.fixture
def alone(server: PagedRunningServer) -> int:
    return server.port


def test_an_error_that_follows_comments_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other server has let the prompt wait in line, in vain."""
    answer: Any = BytesIO(b': keepalive\n\ndata: {"error":{"message":"busy"}}\n\n')
    answer = SimpleNamespace(status=200, readline=answer.readline)
    connection = MagicMock(**{"getresponse.return_value": answer})
    monkeypatch.setattr("http.client.HTTPConnection", lambda *_, **__: connection)
    asked = PrefillRequest(OtherServer("http://127.0.0.1"), [1], None)
    wait_until(lambda: asked.has_ended)
    assert "busy" in (asked.error or "")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "baichuan_m1"])
def test_the_other_computes_the_prompt_and_this_one_writes_the_text(
    tier: list[str], family: str, tmp_path: Path
) -> None:
    # Windows of the second begin within a page, and it has states and full attention.
    changes = {} if family == "llama" else {"sliding_window": 300}
    model = tiny_folder(tmp_path / family, family, seed=1, **changes)
    tokens = prompt(1)
    with (
        pair(model, tier) as (there, here),
        paged_server("--model", model, *LARGE) as plain,
    ):
        port = plain.port
        assert text_of(here, tokens) == text_of(port, tokens)
        counted = metrics(here)
        assert counted["prompt_tokens_cached_total"] == 1500 // PAGE * PAGE
        assert counted["store_hit_tokens_total"] == 1500 // PAGE * PAGE
        assert metrics(there)["prompt_tokens_total"] == 1500 // PAGE * PAGE + 1
        # A shorter one, one that must not be stored, and one that is known are computed here.
        for asked, body in ((prompt(2, 400), {}), (prompt(3), {"store": False}), (tokens, {})):
            assert text_of(here, asked, **body) == text_of(port, asked)
        assert metrics(there)["prompt_tokens_total"] == 1500 // PAGE * PAGE + 1
        # Of this one the rest alone is handed over.
        longer = [*tokens, *prompt(4, 800)]
        assert text_of(here, longer, cache_salt="a") == text_of(port, longer)
        assert metrics(there)["prompt_tokens_total"] > 2 * 1500


@pytest.mark.slow
def test_another_that_is_not_there_or_has_other_weights_changes_nothing(
    tiny: str, tier: list[str], alone: int, tmp_path: Path
) -> None:
    tokens = prompt(5)
    others = tiny_folder(tmp_path / "others", seed=2)
    with paged_server("--model", others, *LARGE, *tier) as there:
        for port in (there.port, free_port()):
            with paged_server("--model", tiny, *LARGE, *tier, *handing(port)) as here:
                assert text_of(here.port, tokens) == text_of(alone, tokens)
                assert metrics(here.port)["prompt_tokens_cached_total"] == 0


@pytest.mark.slow
def test_the_other_may_ask_for_a_key(
    tiny: str,
    tier: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("KEY", "hunter2-\u00e9")
    (tmp_path / "clients").write_text("alice\nbob\n")
    (tmp_path / "wrong").write_text("hunter3")
    options = ["--model", tiny, *LARGE, *tier]

    def cached(port: int, key: str, tokens: list[int]) -> int | None:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)
        usage = client.completions.create(model="default_model", prompt=tokens).usage
        assert usage
        assert usage.prompt_tokens_details
        return usage.prompt_tokens_details.cached_tokens

    with paged_server(*options, "--api-key", "env:KEY", "--open-status") as there:
        keys = ["--api-key", str(tmp_path / "clients")]
        for key, known in (("env:KEY", 1280), (str(tmp_path / "wrong"), 0)):
            with paged_server(*options, *keys, *handing(there.port), "--prefill-key", key) as here:
                # The two clients have nothing in common, on either server.
                for client in ("alice", "bob"):
                    assert cached(here.port, client, prompt(10 if known else 11)) == known
                counted = metrics(there.port)
                assert counted["prompt_tokens_total"] == 2 * 1281
                assert counted["prompt_tokens_cached_total"] == 0
                assert ("give its API key with --prefill-key" in caplog.text) == (not known)
    assert "hunter" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, 1, *[pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 6)]]
)
def test_either_side_may_be_killed_at_any_time(
    seed: int, tiny: str, redis: RedisServer, tier: list[str], alone: int
) -> None:
    tokens, pages = prompt(100 + seed, 3000), random.Random(seed).randrange(9)
    options = ["--model", tiny, *LARGE, *tier]
    redis.client().flushall()
    with ExitStack() as stack:
        other, there = stack.enter_context(server_process(*options))
        this, here = stack.enter_context(server_process(*options, *handing(there)))
        answers: list[str] = []

        def ask() -> None:
            try:
                answers.append(text_of(here, tokens))
            except (OSError, ValueError):
                answers.append("")

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: redis.client().dbsize() >= pages or answers)
        killed = (other, this)[seed % 2]
        killed.send_signal(signal.SIGKILL)
        asking.join()
        if killed is other:
            assert answers == [text_of(alone, tokens)]
        else:
            # The other one notices that nobody waits, and serves its own clients.
            wait_until(lambda: metrics(there)["num_requests_running"] == 0)
            assert text_of(there, tokens) == text_of(alone, tokens)


@pytest.mark.slow
def test_a_tier_that_hangs_or_is_killed_changes_nothing(
    tiny: str, tmp_path: Path, secret: Path, alone: int
) -> None:
    with redis_server(tmp_path) as own:
        tier = ["--store", own.address, "--store-secret", str(secret)]
        with pair(tiny, tier) as (there, here):
            assert text_of(here, prompt(7)) == text_of(alone, prompt(7))
            with own.stopped():
                assert text_of(here, prompt(12)) == text_of(alone, prompt(12))
            # Nobody waited for pages that could not come.
            assert metrics(there)["prompt_tokens_total"] == 1281
            own.kill()
            assert text_of(here, prompt(8)) == text_of(alone, prompt(8))
