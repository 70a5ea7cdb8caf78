"""Clients name their sessions, and end them: then what nobody else shares is free."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import PagedRunningServer, paged_server, with_small_model
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
    ask(running, path, **{field: "a/b ?\u00e9"})
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
