"""Clients name their sessions, and end them: then what nobody else shares is free."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any
from urllib.parse import quote

import pytest

from paged_kv.server.engine.rows import Rows
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    paged_server,
    wait_until,
    with_small_model,
)
from tests.support.tiny_model import asked

TEXT = "import os\n" * 100
ASKED = [{"role": "user", "content": TEXT}]
# What each interface calls the prompt and the most tokens.
INTERFACES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 4},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4},
    "/v1/messages": {"messages": ASKED, "max_tokens": 4},
}
FIELDS = [
    (path, field)
    for path in INTERFACES
    for field in ("session_id", "prompt_cache_key")
    if (path, field) != ("/v1/messages", "prompt_cache_key")
]
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[PagedRunningServer]:
    """Of a model that has windows too."""
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", "32MB"]
    with with_small_model(), paged_server(*options) as started:
        yield started


def ask(running: PagedRunningServer, path: str = COMPLETIONS, **more: Any) -> None:
    """Have a prompt answered and cached."""
    status, answer = asked(running, path, INTERFACES[path] | more)
    assert status == 200, answer
    running.wait_until_idle()


def end(running: PagedRunningServer, name: str, query: str = "") -> tuple[int, Any]:
    return asked(running, f"/v1/sessions/{quote(name, safe='')}{query}", method="DELETE")


def cached_blocks(running: PagedRunningServer) -> int:
    """Blocks' worth of tokens that later prompts find."""
    return len(running.pools[0].index)


@pytest.mark.parametrize(("path", "field"), FIELDS)
@pytest.mark.slow
def test_the_end_of_a_session_frees_its_blocks(
    path: str, field: str, running: PagedRunningServer
) -> None:
    before = cached_blocks(running)
    # One that runs alone is part of its session too.
    alone = {"prompt_logprobs": 1} if field == "session_id" and path == COMPLETIONS else {}
    ask(running, path, **{field: "a/b ?\u00e9"}, **alone)
    blocks = cached_blocks(running) - before
    assert blocks > 1
    status, said = end(running, "a/b ?\u00e9")
    told = {"id": "a/b ?\u00e9", "object": "session.deleted", "deleted": True}
    assert (status, said) == (200, told | {"freed_blocks": blocks})
    assert cached_blocks(running) == before
    if not before:
        assert running.pools[0].stats().blocks_cached == 0  # windows' blocks too
    status, answer = end(running, "a/b ?\u00e9")
    assert (status, answer["error"]["code"]) == (404, "session_not_found")


def test_what_another_session_or_nobodys_prompt_shares_stays(running: PagedRunningServer) -> None:
    before = cached_blocks(running)
    for session in "ab":
        ask(running, session_id=session, prompt=[5] * 600 + [ord(session)] * 300, max_tokens=1)
    ask(running, session_id="a", prompt=[5] * 300)
    ask(running, prompt=[5] * 300)
    # They part within their third block, and a's shorter prompt within the second.
    assert end(running, "a")[1]["freed_blocks"] == 2
    assert end(running, "b")[1]["freed_blocks"] == 3
    assert cached_blocks(running) == before + 2
    running.provider.factories[0].clear()


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_other_names_are_refused(path: str, field: str, running: PagedRunningServer) -> None:
    values: list[Any] = ["", "s" * 257, 5, ["a"], {}, True]
    for value in values:
        status, answer = asked(running, path, INTERFACES[path] | {field: value})
        assert status == 400
        assert answer["error"]["message"].startswith(f"{field}: ")


def test_both_names_must_be_one(running: PagedRunningServer) -> None:
    for path in [path for path, field in FIELDS if field == "prompt_cache_key"]:
        ask(running, path, session_id="s" * 256, prompt_cache_key="s" * 256)
        assert end(running, "s" * 256)[0] == 200
        both = {"session_id": "a", "prompt_cache_key": "b"}
        status, answer = asked(running, path, INTERFACES[path] | both)
        assert (status, answer["error"]["param"]) == (400, "session_id")
    ask(running, session_id=None, prompt_cache_key=None)


def test_salts_have_sessions_of_their_own(running: PagedRunningServer) -> None:
    ask(running, session_id="a", cache_salt="alice")
    # Its prompts are the same client's, though no store may keep them.
    ask(running, session_id="a", cache_salt="alice", store=False, prompt=TEXT + "import sys\n" * 50)
    for query in ("", "?cache_salt=bob"):
        assert end(running, "a", query)[0] == 404
    assert end(running, "a", "?cache_salt=alice")[1]["freed_blocks"] > 2
    assert cached_blocks(running) == 0


def test_a_running_request_keeps_its_pages_and_its_session_lives_again(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cached_blocks(running)
    ask(running, session_id="a", prompt=[5] * 600)
    began, goes_on = Event(), Event()
    step = Rows.step

    def waiting(rows: Rows) -> Any:
        yield from step(rows)
        began.set()
        assert goes_on.wait(PATIENCE_S)

    monkeypatch.setattr(Rows, "step", waiting)
    with ThreadPoolExecutor(2) as clients:
        prompt = [*[5] * 600, 6, 7]
        answer = clients.submit(ask, running, session_id="a", prompt=prompt, max_tokens=8)
        assert began.wait(PATIENCE_S)
        ended = clients.submit(end, running, "a")
        goes_on.set()
        assert ended.result()[0] == 200
        answer.result()
    assert cached_blocks(running) == before + 3
    assert end(running, "a")[1]["freed_blocks"] == 3
    assert end(running, "a")[0] == 404


def test_a_waiting_request_makes_a_session_that_can_be_ended(
    running: PagedRunningServer,
) -> None:
    mailbox = running.service.thread._mailbox
    running.hold_until_submitted(2)
    wait_until(lambda: not mailbox._commands)  # the thread waits for both
    with ThreadPoolExecutor(2) as clients:
        answer = clients.submit(ask, running, session_id="a")
        wait_until(lambda: len(mailbox._commands) == 1)
        ended = clients.submit(end, running, "a")
        status, said = ended.result()
        assert (status, said["freed_blocks"]) == (200, 0)
        answer.result()
    assert end(running, "a")[1]["freed_blocks"] > 1
