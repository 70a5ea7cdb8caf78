"""What bodies of requests may hold. A body is refused at its first fault, whatever follows it."""

import json
from typing import Any

import pytest

from paged_kv.server.http import request_body
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.http.request_body import checked, parse_body, parsed_json
from paged_kv.server.http.schema import Body, ChatBody, TextBody
from paged_kv.server.messages.requests import MessagesBody
from paged_kv.server.responses.requests import ResponsesBody
from tests.support.bad_requests import CHAT, GOOD, TEXT

KINDS: dict[str, type[Body]] = {TEXT: TextBody, CHAT: ChatBody}
USER: dict[str, Any] = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}


def parsed(path: str, **fields: Any) -> Any:
    return parse_body(json.dumps(GOOD[path] | fields).encode(), KINDS[path])


def keys(size: int, value: Any = "") -> dict[str, Any]:
    return dict.fromkeys(map(str, range(size)), value)


@pytest.mark.parametrize(
    ("path", "param", "sized", "most"),
    [
        (TEXT, "stop", lambda size: ["x"] * size, 16),
        (TEXT, "stop", lambda size: ["x" * (size - 1), "x"], 4096),
        (TEXT, "prompt", lambda size: ["a"] * size, 128),
        (TEXT, "logit_bias", lambda size: keys(size, 0), 65_536),
        (CHAT, "messages", lambda size: [USER] * size, 2048),
        (CHAT, "messages.0.content", lambda size: [USER | {"content": [PART] * size}], 2048),
        (CHAT, "tools", lambda size: [{}] * size, 1024),
        (CHAT, "chat_template_kwargs", keys, 128),
        (CHAT, "role_mapping", keys, 128),
    ],
)
def test_every_list_has_a_limit(path: str, param: str, sized: Any, most: int) -> None:
    field = param.partition(".")[0]
    assert parsed(path, **{field: sized(most)})
    with pytest.raises(APIError, match="at most") as refused:
        parsed(path, **{field: sized(most + 1)})
    assert (refused.value.status, refused.value.param) == (400, param)


def body_with(values: str) -> bytes:
    """Templates read any field of a message."""
    return b'{"messages": [{"role": "user", "content": "a", "x": %b}]}' % values.encode()


@pytest.mark.parametrize(
    ("repeated", "why"),
    [
        ("{}", "objects and lists"),
        ("[]", "objects and lists"),
        ('"a"', "texts"),
        (r'"\\"', "texts"),
        ("0", "commas"),
    ],
)
def test_the_values_of_a_body_have_limits(
    repeated: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "MOST_PARTS", 1000)
    monkeypatch.setattr(request_body, "MOST_COMMAS", 1000)

    def body(count: int) -> bytes:
        return body_with(f"[{','.join([repeated] * count)}]")

    assert parse_body(body(990), ChatBody)
    with pytest.raises(APIError, match=f"{why}.*, and at most 1,000"):
        parse_body(body(1010), ChatBody)


def test_what_texts_hold_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a long JSON file, or its escapes, in a prompt."""
    for name in ("MOST_PARTS", "MOST_COMMAS"):
        monkeypatch.setattr(request_body, name, 20)
    text = '{"a\\": ["b", [[]]], \\\\' * 1000
    assert parse_body(body_with(json.dumps([text, text])), ChatBody)


ITEM: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
CALL: Any = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
BLOCK: Any = {"type": "text", "text": "a"}


def said(*blocks: Any) -> Any:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        (ResponsesBody, {"input": 5}, "input: Input should be a valid string or a valid list, "),
        (ResponsesBody, {"input": []}, "input: List should have at least 1 item"),
        (ResponsesBody, {"input": [ITEM, {"type": "x"}]}, "input.1: the type 'x' is none of 'me"),
        (ResponsesBody, {"input": [7]}, "input.0: an object with a type is needed, got 7"),
        (ResponsesBody, {"input": [CALL | {"arguments": {}}]}, "input.0.arguments: Input should"),
        (ResponsesBody, {"input": [{"type": "function_call"}]}, "input.0.call_id: Field required"),
        (ResponsesBody, {"input": [ITEM | {"role": "x"}]}, "input.0.role: Input should be 'user'"),
        (ResponsesBody, {"input": [ITEM | {"content": [BLOCK]}]}, "input.0.content.0: the type 't"),
        (ResponsesBody, {"input": "a", "tool_choice": {"type": "x"}}, "tool_choice.type: Input sh"),
        (MessagesBody, said(BLOCK | {"text": 5}), "messages.0.content.0.text: Input should be a v"),
        (MessagesBody, said(BLOCK | {"x": 5}), "messages.0.content.0.x: Extra inputs are not per"),
        (MessagesBody, said({"type": "text"}), "messages.0.content.0.text: Field required"),
        (MessagesBody, said(BLOCK | {"cache_control": 5}), "messages.0.content.0.cache_control: "),
        (ChatBody, {"messages": [USER | {"content": [5]}]}, "messages.0.content.0: Input should b"),
        (ChatBody, GOOD[CHAT] | {"logit_bias": {"a": 1}}, "logit_bias.a: String should match"),
        (
            ChatBody,
            GOOD[CHAT] | {"response_format": {"type": "json_schema", "json_schema": {"x": 1}}},
            "response_format.json_schema.schema: Field required",
        ),
    ],
)
def test_an_error_tells_of_what_was_meant(kind: Any, body: Any, told: str) -> None:
    with pytest.raises(APIError) as refused:
        checked(body, kind)
    assert refused.value.message.startswith(told)
    assert refused.value.param == told.partition(":")[0]


@pytest.mark.parametrize("number", ["1e999", "-1.5E+400", "1" * 400 + ".0"])
def test_numbers_beyond_any_float_are_refused_wherever_they_are(number: str) -> None:
    """An answer of Responses repeats its tools."""
    tool = {"type": "function", "name": "f", "parameters": {"maximum": 5, "title": "1e999"}}
    body = json.dumps({"input": "a", "tools": [tool]}).encode()
    assert parse_body(body, ResponsesBody)
    with pytest.raises(APIError, match=r"1\.8e308"):
        parse_body(body.replace(b"5", number.encode()), ResponsesBody)


def test_null_means_missing_at_every_depth_but_where_it_is_a_value() -> None:
    own = {"parameters": {"default": None}, "arguments": {"a": None}, "schema": {"enum": [None]}}
    own |= {"chat_template_kwargs": {"a": None}, "prompt": [None], "input": {"a": {"b": None}}}
    item = {"a": 1, "b": [{"c": {}}], **own}
    with_nulls = item | {"x": None, "b": [{"c": {"x": None}, "x": None}]}
    sent = {"input": [with_nulls], "messages": {"x": with_nulls}, "x": None, "stop": [None]}
    read = {"input": [item], "messages": {"x": item}, "stop": [None]}
    assert parsed_json(json.dumps(sent).encode()) == read
