"""Answers end where the model's context or the memory ends, and say so."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.running_server import PagedRunningServer, paged_server
from tests.support.tiny_model import tiny_folder

CONTEXT = 96
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "import os"}]
# A request of each interface, the name of its limit, and those of its counts.
ASKED: dict[str, tuple[dict[str, Any], str, tuple[str, str]]] = {
    TEXT: ({"prompt": "import os"}, "max_tokens", ("prompt_tokens", "completion_tokens")),
    CHAT: ({"messages": USER}, "max_completion_tokens", ("prompt_tokens", "completion_tokens")),
    MESSAGES: ({"messages": USER}, "max_tokens", ("input_tokens", "output_tokens")),
    RESPONSES: ({"input": "import os"}, "max_output_tokens", ("input_tokens", "output_tokens")),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagedRunningServer]:
    """A server of a model with a short context."""
    folder = tmp_path_factory.mktemp("models") / "short"
    model = tiny_folder(folder, max_position_embeddings=CONTEXT)
    with paged_server("--model", model, "--max-kv-bytes", "64MB", "--max-tokens", "8") as started:
        yield started


def post(port: int, path: str, **body: Any) -> tuple[http.client.HTTPResponse, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    client.request("POST", path, json.dumps({"temperature": 0, "ignore_eos": True, **body}))
    answer = client.getresponse()
    return answer, answer.read()


def asked(running: PagedRunningServer, path: str, most: int | None) -> tuple[Any, Any]:
    """The header and the JSON of the answer to a request of an interface."""
    body, name, _ = ASKED[path]
    answer, content = post(running.port, path, **body, **({} if most is None else {name: most}))
    assert answer.status == 200, content
    return answer.headers["X-Max-Tokens"], json.loads(content)


def test_each_prompt_of_a_request_fits_by_itself(running: PagedRunningServer) -> None:
    lengths = (CONTEXT - 30, CONTEXT - 10)
    prompts = [[7] * length for length in lengths]
    answer, content = post(running.port, TEXT, prompt=prompts, max_tokens=20, logprobs=0)
    said = json.loads(content)
    counts = [len(choice["logprobs"]["tokens"]) for choice in said["choices"]]
    assert counts == [20, 10]
    assert (answer.headers["X-Max-Tokens"], said["usage"]["max_tokens"]) == ("10", 10)


def test_a_prompt_that_leaves_no_room_is_refused(running: PagedRunningServer) -> None:
    assert post(running.port, TEXT, prompt=[7] * (CONTEXT - 1), max_tokens=1)[0].status == 200
    assert post(running.port, TEXT, prompt=[7] * CONTEXT, max_tokens=0)[0].status == 200
    for most in (1, 8, -1):
        answer, content = post(running.port, TEXT, prompt=[7] * CONTEXT, max_tokens=most)
        error = json.loads(content)["error"]
        assert answer.status == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert f"prompt is too long: {CONTEXT} tokens > {CONTEXT - 1} maximum" in error["message"]
