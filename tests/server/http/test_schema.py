"""What bodies of requests may hold. A body is refused at its first fault, whatever follows it."""

import json
from typing import Any

import pytest

from paged_kv.server.http import request_body
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.http.request_body import parse_body
from paged_kv.server.http.schema import Body, ChatBody, TextBody
from tests.support.bad_requests import CHAT, GOOD, TEXT

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
