"""Clients send back what the official packages make of answers, in bodies of any encoding."""

import gzip
import json
import zlib
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from importlib import import_module
from importlib.util import find_spec
from random import Random
from typing import Any

import pytest
from anthropic.types import Message
from anthropic.types.beta import BetaMessage
from openai.types.chat import ChatCompletion, ParsedChatCompletion
from openai.types.responses import ParsedResponse, Response

from paged_kv.server.completions.answer_bodies import read_completion
from paged_kv.server.completions.chat_messages import copied, require_parts
from paged_kv.server.completions.request_jobs import constraint_of
from paged_kv.server.http.request_body import _ZSTD, BodyDecoder
from paged_kv.server.http.schema import ChatBody
from paged_kv.server.messages.messages import read_messages
from paged_kv.server.messages.requests import MessagesBody
from paged_kv.server.options import ServerOptions
from paged_kv.server.responses.kept_responses import KeptResponses
from paged_kv.server.responses.responses import read_responses
from tests.support.agent_model import Script
from tests.support.running_server import PATIENCE_S, PagedRunningServer

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TURNS = 4
SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "default": None}}}
NAMED = {"name": "read", "description": "Reads."}
FUNCTION = {"type": "function", **NAMED, "parameters": SCHEMA}
NAMESPACE = {"type": "namespace", "name": "b", "description": "", "tools": [FUNCTION]}
TOOLS: dict[str, Any] = {
    CHAT: [{"type": "function", "function": {**NAMED, "parameters": SCHEMA}}],
    MESSAGES: [{**NAMED, "input_schema": SCHEMA}],
    RESPONSES: [FUNCTION, {"type": "custom", "name": "a"}, NAMESPACE],
}
WITHOUT_MEANING: dict[str, Any] = {
    CHAT: {"user": "a", "metadata": {"a": "b"}, "verbosity": "low", "service_tier": "auto"},
    MESSAGES: {"metadata": {"user_id": "a"}, "thread": {"type": "create"}, "speed": "standard"},
    RESPONSES: {"user": "a", "client_metadata": {"a": "b"}, "reasoning": {"context": "auto"}},
}
LIMITS = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
ANSWERS = (
    "Yes.",
    "<think>\nSo.\n</think>\n\nNo.",
    'I look.\n<tool_call>\n{"name": "read", "arguments": {"path": "a", "all": null}}\n</tool_call>',
    '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>',
)
# Of packages of any version.
NULLS = ("caller", "namespace", "async", "toolset_name", "parsed", "of_no_version")
BROKEN = ['{"path": "a', "", "[1]", "null", "none"]
OWN = ("parameters", "input_schema", "arguments")
ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "identity": bytes,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
}
if find_spec(_ZSTD.partition(".")[0]):
    ENCODINGS["zstd"] = import_module(_ZSTD).compress


def with_nulls(value: Any, draw: Random) -> Any:
    """The same with keys here and there that are null."""
    if isinstance(value, list):
        return [with_nulls(each, draw) for each in value]
    if not isinstance(value, dict):
        return value
    more = dict.fromkeys(draw.sample(NULLS, draw.randrange(3)))
    return {
        **more,
        **{name: each if name in OWN else with_nulls(each, draw) for name, each in value.items()},
    }


def sent_back(path: str, answer: Any, draw: Random) -> tuple[list[Any], list[str]]:
    """What a client sends of an answer, and the ids of the calls in it."""
    is_plain = draw.random() < 0.5
    if path == CHAT:
        chat: Any = (ChatCompletion if is_plain else ParsedChatCompletion[Any]).model_validate(
            answer
        )
        message = chat.choices[0].message.model_dump()
        return [message], [call["id"] for call in message["tool_calls"] or ()]
    if path == MESSAGES:
        blocks = (Message if is_plain else BetaMessage).model_validate(answer).content
        content = [block.model_dump() for block in blocks]
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        return [{"role": "assistant", "content": content}], calls
    response: Any = (Response if is_plain else ParsedResponse[Any]).model_validate(answer)
    items = [item.model_dump() for item in response.output]
    if not is_plain:
        for part in (part for item in items if "role" in item for part in item["content"]):
            part["parsed"] = {"a": 1}
    return items, [item["call_id"] for item in items if item["type"] == "function_call"]


def result_of(path: str, call: str) -> Any:
    if path == MESSAGES:
        block = {"type": "tool_result", "tool_use_id": call, "content": "empty", "is_error": None}
        return {"role": "user", "content": [block]}
    if path == RESPONSES:
        return {"type": "function_call_output", "call_id": call, "output": "empty"}
    return {"role": "tool", "tool_call_id": call, "content": "empty"}


def broken(items: Any, draw: Random) -> None:
    """Leave calls with arguments as models write them whose answers were cut."""
    for item in items:
        calls = [call["function"] for call in item.get("tool_calls") or ()]
        for call in [*calls, *([item] if item.get("type") == "function_call" else [])]:
            call["arguments"] = draw.choice(BROKEN)


def asked(path: str, items: list[Any], draw: Random) -> dict[str, Any]:
    body = {
        "input" if path == RESPONSES else "messages": items,
        "tools": TOOLS[path],
        "stream": draw.choice([True, False, False, None]),
        LIMITS[path]: draw.choice([4, 12, 100]),
    }
    return {**with_nulls(body, draw), **(WITHOUT_MEANING[path] if draw.random() < 0.5 else {})}


def turn(path: str, draw: Random) -> list[Any]:
    """What an answer that was cut, or that another server gave, left of a turn."""
    text, cut = draw.choice(["a", ""]), draw.choice(BROKEN)
    call: dict[str, Any]
    role = draw.choice(["user", "system", "user" if path == MESSAGES else "developer"])
    part = {"type": "input_text" if path == RESPONSES else "text", "text": text}
    said: list[Any] = [{"role": role, "content": draw.choice([text, [part]])}]
    if path == CHAT:
        call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": cut}}
        said.append({"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]})
    elif path == MESSAGES:
        thought = {"type": "thinking", "thinking": text, "signature": text}
        blocks: list[Any] = [thought, {"type": "redacted_thinking", "data": "a"}, part]
        call = {"type": "tool_use", "id": "c", "name": "read", "input": draw.choice([{}, cut])}
        said.append({"role": "assistant", "content": [*draw.sample(blocks, 2), call]})
    else:
        said.append({"type": "reasoning", "summary": [], "content": None, "encrypted_content": "a"})
        call = {"call_id": "c", "name": "a", "namespace": draw.choice([None, "b"]), "id": None}
        said.append({"type": "function_call", **call, "arguments": cut})
        said.append({"type": "custom_tool_call", **call, "input": cut})
        said.append({"type": "custom_tool_call_output", "call_id": "c", "output": text})
    return [*said, result_of(path, "c")]


def test_no_request_that_official_packages_can_send_is_refused() -> None:
    draw, options = Random(69), ServerOptions()
    readers: dict[str, Callable[..., Any]] = {
        CHAT: partial(read_completion, ChatBody),
        MESSAGES: partial(read_messages, MessagesBody, options),
        RESPONSES: partial(read_responses, KeptResponses(options)),
    }
    for _ in range(300):
        path, encoding = draw.choice([*TOOLS]), draw.choice([*ENCODINGS])
        items = [item for _ in range(draw.randrange(1, 4)) for item in turn(path, draw)]
        content = json.dumps(asked(path, items, draw)).encode()
        decoded = BodyDecoder(encoding).decode(ENCODINGS[encoding](content), 1 << 20)
        body = readers[path](decoded, None).body
        constraint_of(body)
        require_parts(copied(body.messages), why_no_images="", urls_allowed=False)


def post(running: PagedRunningServer, path: str, body: Any, encoding: str) -> tuple[int, bytes]:
    client = HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    content = ENCODINGS[encoding](json.dumps(body).encode())
    client.request("POST", path, content, {"Content-Encoding": encoding})
    with client.getresponse() as answer:
        return answer.status, answer.read()


@pytest.mark.parametrize(
    "requests",
    [pytest.param(40, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.soak)],
)
def test_no_answer_that_is_sent_back_gets_400(
    running: PagedRunningServer, script: Script, requests: int
) -> None:
    draw = Random(69)
    items: list[Any] = []
    path = CHAT
    for number in range(requests):
        if number % TURNS == 0:
            items, path = [], draw.choice(list(TOOLS))
        items.append({"role": "user", "content": draw.choice(["Look.", "Well?"])})
        script.says(draw.choice(ANSWERS))
        body = asked(path, items, draw)
        status, answer = post(running, path, body, draw.choice(list(ENCODINGS)))
        assert status == 200, (path, items, answer)
        assert b'"error":{' not in answer
        if body["stream"]:
            continue
        said, calls = sent_back(path, json.loads(answer), draw)
        if draw.random() < 0.5:
            broken(said, draw)
        items += [*said, *(result_of(path, call) for call in calls)]
