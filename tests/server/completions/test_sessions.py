"""Clients name their sessions, and end them: then what nobody else shares is free."""

import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote

import pytest

from paged_kv.server.engine.jobs import SessionEnd
from paged_kv.server.engine.rows import Rows
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    paged_server,
    wait_until,
    with_small_model,
)

OPTIONS = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", "32MB"]
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


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with with_small_model():
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[PagedRunningServer]:
    with paged_server(*OPTIONS) as started:
        yield started


@pytest.fixture
def running(server: PagedRunningServer) -> Iterator[PagedRunningServer]:
    yield server
    assert_idle_pools_hold_nothing(server)


def request(
    running: PagedRunningServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content


def ask(running: PagedRunningServer, path: str = COMPLETIONS, **more: Any) -> None:
    """Have a prompt answered and cached."""
    status, answer = request(running, "POST", path, INTERFACES[path] | more)
    assert status == 200, answer
    running.wait_until_idle()


def end(running: PagedRunningServer, name: str, query: str = "", **headers: str) -> tuple[int, Any]:
    return request(running, "DELETE", f"/v1/sessions/{quote(name, safe='')}{query}", **headers)


def cached_blocks(running: PagedRunningServer) -> int:
    """Blocks' worth of tokens that later prompts find."""
    return len(running.pools[0].index)


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_the_end_of_a_session_frees_its_blocks(
    path: str, field: str, running: PagedRunningServer
) -> None:
    before = cached_blocks(running)
    ask(running, path, **{field: "a/b ?\u00e9"})
    blocks = cached_blocks(running) - before
    assert blocks > 1
    assert end(running, "a/b ?\u00e9") == (
        200,
        {
            "id": "a/b ?\u00e9",
            "object": "session.deleted",
            "deleted": True,
            "freed_blocks": blocks,
        },
    )
    assert cached_blocks(running) == before
    if not before:
        assert running.pools[0].stats().blocks_cached == 0  # windows' blocks too
    status, answer = end(running, "a/b ?\u00e9")
    assert (status, answer["error"]["code"]) == (404, "session_not_found")
    assert "there is no session 'a/b ?\u00e9'" in answer["error"]["message"]


def test_a_request_that_runs_alone_is_part_of_its_session(running: PagedRunningServer) -> None:
    before = cached_blocks(running)
    ask(running, session_id="a", prompt_logprobs=1)
    blocks = cached_blocks(running) - before
    assert blocks > 1
    assert end(running, "a")[1]["freed_blocks"] == blocks


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
@pytest.mark.parametrize("value", ["", "s" * 257, 5, ["a"], {}, True])
def test_other_names_are_refused(
    path: str, field: str, value: Any, running: PagedRunningServer
) -> None:
    status, answer = request(running, "POST", path, INTERFACES[path] | {field: value})
    assert status == 400
    assert answer["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("path", [path for path, field in FIELDS if field == "prompt_cache_key"])
def test_both_names_must_be_one(path: str, running: PagedRunningServer) -> None:
    ask(running, path, session_id="s" * 256, prompt_cache_key="s" * 256)
    assert end(running, "s" * 256)[0] == 200
    both = {"session_id": "a", "prompt_cache_key": "b"}
    status, answer = request(running, "POST", path, INTERFACES[path] | both)
    assert (status, answer["error"]["param"]) == (400, "session_id")
    assert "prompt_cache_key names another session" in answer["error"]["message"]
    ask(running, path, session_id=None, prompt_cache_key=None)


def test_users_of_messages_are_no_sessions(running: PagedRunningServer) -> None:
    ask(running, "/v1/messages", metadata={"user_id": "a"})
    assert end(running, "a")[0] == 404
    status, _ = request(
        running, "POST", "/v1/messages", INTERFACES["/v1/messages"] | {"prompt_cache_key": "a"}
    )
    assert status == 400
    running.provider.factories[0].clear()


def test_salts_have_sessions_of_their_own(running: PagedRunningServer) -> None:
    ask(running, session_id="a", cache_salt="alice")
    # Its prompts are the same client's, though no store may keep them.
    ask(running, session_id="a", cache_salt="alice", store=False, prompt=TEXT + "import sys\n" * 50)
    for query in ("", "?cache_salt=bob"):
        assert end(running, "a", query)[0] == 404
    assert end(running, "a", "?cache_salt=alice")[1]["freed_blocks"] > 2
    assert cached_blocks(running) == 0


def test_keys_have_sessions_of_their_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice\nbob\n")
    alice, bob = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}
    with paged_server(*OPTIONS, "--api-key", str(keys)) as running:
        body = INTERFACES[COMPLETIONS] | {"session_id": "a"}
        assert request(running, "POST", COMPLETIONS, body, **alice)[0] == 200
        running.wait_until_idle()
        assert end(running, "a")[0] == 401
        assert end(running, "a", **bob)[0] == 404
        assert end(running, "a", **alice)[0] == 200


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
        asked = clients.submit(ask, running, session_id="a", prompt=prompt, max_tokens=8)
        assert began.wait(PATIENCE_S)
        ended = clients.submit(end, running, "a")
        goes_on.set()
        assert ended.result()[0] == 200
        asked.result()
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
        asked = clients.submit(ask, running, session_id="a")
        wait_until(lambda: len(mailbox._commands) == 1)
        ended = clients.submit(end, running, "a")
        assert ended.result() == (
            200,
            {"id": "a", "object": "session.deleted", "deleted": True, "freed_blocks": 0},
        )
        asked.result()
    assert end(running, "a")[1]["freed_blocks"] > 1


def test_other_ranks_get_no_future() -> None:
    sent = pickle.loads(pickle.dumps(SessionEnd("a", "salt")))
    assert (sent.session, sent.salt) == ("a", "salt")
