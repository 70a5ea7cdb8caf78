"""Every field of the four interfaces, wrong in type, range or size: 400, and nobody is disturbed.

The schemas that the server checks bodies with say what is wrong, as an independent library reads
them.
"""

import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from itertools import islice
from threading import Event
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from paged_kv.server.http.schema import ChatBody, TextBody
from paged_kv.server.messages.requests import MessagesBody
from paged_kv.server.responses.requests import ResponsesBody
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    paged_server,
    with_small_model,
)

SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
MARK = {"type": "ephemeral", "ttl": "1h"}

# Bodies in which every nested kind of field occurs; the fields at the top come from the schemas.
GOOD: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (TextBody, {"prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": (
        ChatBody,
        {
            "max_tokens": 1,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "a"},
            ],
            "tools": [FUNCTION],
            "stream_options": {"include_usage": False},
        },
    ),
    "/v1/messages": (
        MessagesBody,
        {
            "max_tokens": 1,
            "system": [{"type": "text", "text": "a", "cache_control": {**MARK}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a", "signature": "a"},
                        {"type": "text", "text": "a"},
                        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "is_error": False,
                            "content": [{"type": "text", "text": "a"}],
                        }
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "a", "input_schema": SCHEMA}],
            "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
            "output_config": {"effort": "low"},
            "cache_control": {**MARK},
        },
    ),
    "/v1/responses": (
        ResponsesBody,
        {
            "max_output_tokens": 1,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "a"}],
                },
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "a"},
                {"type": "custom_tool_call", "call_id": "b", "name": "g", "input": "a"},
            ],
            "tools": [
                {"type": "function", "name": "f", "parameters": SCHEMA},
                {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "g"}]},
            ],
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "text"}},
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"},
        },
    ),
}
VALUES: list[Any] = [
    *(True, 0, -1, 5, 1.5, 1e300, 10**30, -(10**30), "", "a", "a" * 300_000),
    *([], ["a"], [5], [[]], [{}], {}, {"a": 5}, {"type": "a"}, {"a": {"a": []}}),
]
LONGER = 2500


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A body with another value at a path."""
    body = copy.deepcopy(body)
    *to, last = path
    place = body
    for step in to:
        place = place[step]
    place[last] = value
    return body


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for step, inner in pairs:
        yield (*path, step)
        if isinstance(inner, list | dict) and step not in ("parameters", "input_schema"):
            yield from paths(inner, (*path, step))


def wrong_bodies(path: str) -> Iterator[tuple[str, Any]]:
    """The field at the top that is wrong, and the body."""
    kind, good = GOOD[path]
    schema = kind.model_json_schema()
    validator = Draft202012Validator(schema)
    assert not list(validator.iter_errors(good))
    places = dict.fromkeys([*paths(good), *((name,) for name in schema["properties"])])
    for place in places:
        for value in VALUES:
            body = changed(good, place, value)
            if not validator.is_valid(body):
                yield place[0], body
    for place in paths(good):
        found: Any = good
        for step in place:
            found = found[step]
        if isinstance(found, list) and found:
            yield place[0], changed(good, place, found[:1] * LONGER)


@pytest.fixture(scope="module")
def running() -> Iterator[PagedRunningServer]:
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", "64MB"]
    # Its template has no tools, which some bodies have.
    options += ["--max-prompt-tokens", "300", "--drop-tools"]
    with with_small_model(), paged_server(*options) as server:
        yield server
        assert_idle_pools_hold_nothing(server)


def post(client: HTTPConnection, path: str, body: Any) -> tuple[int, Any]:
    client.request("POST", path, json.dumps(body))
    with client.getresponse() as answer:
        return answer.status, json.loads(answer.read())


def opened(running: PagedRunningServer) -> HTTPConnection:
    return HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)


def text_of(running: PagedRunningServer) -> str:
    """What anybody else gets."""
    body = {"prompt": "import os", "max_tokens": 16, "temperature": 0}
    status, answer = post(opened(running), "/v1/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


@pytest.mark.parametrize(
    "share",
    [pytest.param(4, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("path", list(GOOD))
def test_every_wrong_field_gets_400_and_disturbs_nobody(
    path: str, share: int, running: PagedRunningServer
) -> None:
    """Of the bodies one in `share` is sent."""
    client, has_ended = opened(running), Event()
    calm = text_of(running)

    def others() -> set[str]:
        texts = {text_of(running)}
        while not has_ended.is_set():
            texts.add(text_of(running))
        return texts

    asked = 0
    with ThreadPoolExecutor(1) as threads:
        meanwhile = threads.submit(others)
        try:
            for field, body in islice(wrong_bodies(path), 0, None, share):
                status, answer = post(client, path, body)
                shown = json.dumps(body)[:500]
                assert status == 400, (field, shown, answer)
                error = answer["error"]
                param = error["details"]["param"] if path == "/v1/messages" else error["param"]
                assert str(param).partition(".")[0] == field, (shown, error)
                asked += 1
        finally:
            has_ended.set()
        assert meanwhile.result(PATIENCE_S) == {calm}
    assert asked > 150 // share
    assert post(client, path, GOOD[path][1])[0] == 200
