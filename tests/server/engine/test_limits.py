"""Answers end where the model's context or the memory ends, and say so."""

import json
from collections.abc import Iterator

import pytest

from tests.support.running_server import PagedRunningServer, paged_server
from tests.support.server_process import post
from tests.support.tiny_model import tiny_folder

CONTEXT = 96


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagedRunningServer]:
    """A server of a model with a short context."""
    folder = tmp_path_factory.mktemp("models") / "short"
    model = tiny_folder(folder, max_position_embeddings=CONTEXT)
    with paged_server("--model", model, "--max-kv-bytes", "64MB", "--max-tokens", "8") as started:
        yield started


def test_each_prompt_of_a_request_fits_by_itself(running: PagedRunningServer) -> None:
    lengths = (CONTEXT - 30, CONTEXT - 10)
    prompts = [[7] * length for length in lengths]
    asked = {"max_tokens": 20, "logprobs": 0, "temperature": 0, "ignore_eos": True}
    answer = post(running.port, prompt=prompts, **asked)
    said = json.load(answer)
    counts = [len(choice["logprobs"]["tokens"]) for choice in said["choices"]]
    assert counts == [20, 10]
    assert (answer.headers["X-Max-Tokens"], said["usage"]["max_tokens"]) == ("10", 10)


def test_a_prompt_that_leaves_no_room_is_refused(running: PagedRunningServer) -> None:
    assert post(running.port, prompt=[7] * (CONTEXT - 1), max_tokens=1).status == 200
    assert post(running.port, prompt=[7] * CONTEXT, max_tokens=0).status == 200
    for most in (1, 8, -1):
        answer = post(running.port, prompt=[7] * CONTEXT, max_tokens=most)
        error = json.load(answer)["error"]
        assert answer.status == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert f"prompt is too long: {CONTEXT} tokens > {CONTEXT - 1} maximum" in error["message"]
