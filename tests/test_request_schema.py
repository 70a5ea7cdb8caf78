"""What bodies of requests may hold. A body is refused at its first fault, whatever follows it."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from paged_kv.integrations.server.http import request_body
from paged_kv.integrations.server.http.api_errors import APIError
from paged_kv.integrations.server.http.request_body import parse_body
from paged_kv.integrations.server.http.schema import Body, ChatBody, TextBody
from tests.bad_requests import CHAT, GOOD, TEXT

KINDS: dict[str, type[Body]] = {TEXT: TextBody, CHAT: ChatBody}
USER = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}


def parsed(path: str, **fields: Any) -> Any:
    return parse_body(json.dumps(GOOD[path] | fields).encode(), KINDS[path])


@pytest.mark.parametrize(
    ("path", "most", "more", "param"),
    [
        (TEXT, {"stop": ["x"] * 16}, {"stop": ["x"] * 17}, "stop"),
        (TEXT, {"stop": ["x" * 2048] * 2}, {"stop": ["x" * 2048, "x" * 2049]}, "stop"),
        (TEXT, {"prompt": ["a"] * 128}, {"prompt": ["a"] * 129}, "prompt"),
        (
            TEXT,
            {"logit_bias": dict.fromkeys(map(str, range(65_536)), 0)},
            {"logit_bias": dict.fromkeys(map(str, range(65_537)), 0)},
            "logit_bias",
        ),
        (CHAT, {"messages": [USER] * 2048}, {"messages": [USER] * 2049}, "messages"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [PART] * 2048}]},
            {"messages": [{"role": "user", "content": [PART] * 2049}]},
            "messages.0.content",
        ),
        (CHAT, {"tools": [{}] * 1024}, {"tools": [{}] * 1025}, "tools"),
        (
            CHAT,
            {"chat_template_kwargs": dict.fromkeys(map(str, range(128)))},
            {"chat_template_kwargs": dict.fromkeys(map(str, range(129)))},
            "chat_template_kwargs",
        ),
        (
            CHAT,
            {"role_mapping": dict.fromkeys(map(str, range(128)), "")},
            {"role_mapping": dict.fromkeys(map(str, range(129)), "")},
            "role_mapping",
        ),
    ],
)
def test_every_list_has_a_limit(
    path: str, most: dict[str, Any], more: dict[str, Any], param: str
) -> None:
    assert parsed(path, **most)
    with pytest.raises(APIError, match="at most") as refused:
        parsed(path, **more)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("value", ["{}", "[]", "0"])
def test_the_values_of_a_body_have_a_limit(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they stand: templates read any field of a message."""
    monkeypatch.setattr(request_body, "MOST_VALUES", 1000)

    def body(count: int) -> bytes:
        values = ",".join([value] * count)
        return b'{"messages": [{"role": "user", "content": "a", "x": [%b]}]}' % values.encode()

    assert parse_body(body(400), ChatBody)
    with pytest.raises(APIError, match="commas and opening brackets, and at most 1,000"):
        parse_body(body(1000), ChatBody)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [5] * 2000},
        {"messages": [{}] * 2000},
        {"messages": [{"role": "user", "content": [5] * 2000}]},
        {"messages": [{"role": "user", "content": [{}] * 2000}]},
        {"messages": [USER | {"tool_calls": [5] * 1000}]},
        {"tools": ["a"] * 1000},
    ],
)
def test_no_list_is_read_beyond_its_first_fault(fields: dict[str, Any]) -> None:
    """A million errors took gigabytes and most of a minute."""
    with pytest.raises(ValidationError) as refused:
        ChatBody.model_validate(GOOD[CHAT] | fields)
    # Of a union, one for each of its types.
    assert refused.value.error_count() <= 2
